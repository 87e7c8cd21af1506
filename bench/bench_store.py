"""The state store: a transaction, and a change's way to a watch, on the embedded store's file and on etcd.

etcd is one server on this machine that waits for its disk, as the embedded store does, so the two can be compared.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from statistics import median
from time import perf_counter

from row import Row

from gyre.store.open import open_store
from gyre.store.protocol import Compare, Put, Store

NAMES = (
    "embedded_txn_ms",
    "etcd_txn_ms",
    "etcd_txn_over_embedded",
    "etcd_receipt_over_none",
    "embedded_watch_ms",
    "etcd_watch_ms",
)

TIMES = 300
VALUE = b"x" * 200


def rows() -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as folder:
        embedded = asyncio.run(measured(f"sqlite://{folder}/state.db"))
        etcd, bare = asyncio.run(on_etcd(Path(folder)))
    yield Row("embedded_txn_ms", embedded[0], "ms", "<= 10", embedded[0] <= 10)
    yield Row("etcd_txn_ms", etcd[0], "ms", "<= 10", etcd[0] <= 10)
    yield Row("etcd_txn_over_embedded", etcd[0] / embedded[0], "x", "<= 5", etcd[0] <= 5 * embedded[0])
    yield Row("etcd_receipt_over_none", etcd[0] / bare, "x", "<= 1.5", etcd[0] <= 1.5 * bare)
    yield Row("embedded_watch_ms", embedded[1], "ms", "<= 10", embedded[1] <= 10)
    yield Row("etcd_watch_ms", etcd[1], "ms", "<= 10", etcd[1] <= 10)


async def measured(url: str) -> tuple[float, float]:
    """Milliseconds of a transaction, and from its start to its event at a watch: medians."""
    store = open_store(url)
    try:
        await store.txn(puts=[Put("/n", VALUE)])
        return await median_ms(lambda: write(store)), await watch_ms(store)
    finally:
        await store.close()


async def on_etcd(folder: Path) -> tuple[tuple[float, float], float]:
    """As `measured`; and the milliseconds of a transaction that leaves no receipt."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from cluster.etcd_binary import etcd_binary
    from cluster.etcd_server import PlainEtcd, answering, client

    from gyre.store.etcd import messages
    from gyre.store.etcd.api import method
    from gyre.store.protocol import Txn

    server = PlainEtcd.make(etcd_binary().path, folder / "etcd", "--unsafe-no-fsync=false")
    server.member.start()
    try:
        async with client(server.url) as asked:
            await answering(asked)
            request = messages.txn_request(Txn((Compare.created("/leader", 0),), (Put("/n", VALUE),)))
            bare = await median_ms(lambda: asked.ask_once(method("KV", "Txn"), request))
        return await measured(server.url), bare
    finally:
        server.member.signal(signal.SIGKILL)


def write(store: Store) -> Awaitable[object]:
    return store.txn([Compare.created("/leader", 0)], [Put("/n", VALUE)])


async def median_ms(work: Callable[[], Awaitable[object]]) -> float:
    taken: list[float] = []
    for _ in range(TIMES):
        began = perf_counter()
        await work()
        taken.append(perf_counter() - began)
    return median(taken) * 1000


async def watch_ms(store: Store) -> float:
    start = (await store.range("/n")).revision
    async with aclosing(store.watch("/n", start + 1)) as events:

        async def write_and_hear() -> None:
            await asyncio.gather(write(store), anext(events))

        return await median_ms(write_and_hear)
