"""The pages of SGLang's host pools from one scheduler's process to another's, whatever SGLang does to them meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gyre import pki
from gyre.engine.access import http_key
from gyre.engine.client import EngineClient, EngineRefused, KvPulled, orders_url
from gyre.engine.ports import free_port
from gyre.errors import BadInput
from gyre.kv_migrate import page_exchange
from gyre.kv_migrate.asking import Line
from gyre.kv_migrate.choice import Kind, look
from gyre.kv_migrate.conversation import AskChecksums, Checksums, Fetch, Granted, Offer, Open
from gyre.kv_migrate.greeting import SharedSecret
from gyre.kv_migrate.hicache_settings import HicacheSettings, hicache_flags
from gyre.kv_migrate.manifest import Manifest
from kv_migrate.host_pool import LAYOUTS, PAGE_SLOTS, TorchPool, content
from kv_migrate.pages import OTHER, Scheduler, page_name
from kv_migrate.peers import between, need

SECRET = "a secret of the engines"
MODEL = "the weights"
LIMIT_S = 60.0
PAGES = 12
KINDS = (Kind.TCP, Kind.MOONCAKE_TCP)


def orders_address(count: int = 1) -> str:
    return f"127.0.0.1:{free_port('127.0.0.1', count)}"


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Of a peer whose pages go by tcp; each takes a port of its own for the orders."""
    (tmp_path / "secret").write_text(SECRET, encoding="utf-8")
    return {"secret_file": str(tmp_path / "secret"), "model": MODEL, "silence_s": 5.0, "transport": Kind.TCP}


@pytest.fixture(params=KINDS)
def either(config: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """The same, of either transport."""
    need(request.param)
    return {**config, "transport": request.param}


@dataclass(frozen=True)
class Source:
    """A scheduler with its pages; `process` is None when it is in this one."""

    process: subprocess.Popen[str] | None
    tell: Callable[[str], None]
    address: str
    epoch: int
    layout: str

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def manifest(self, *numbers: int, **changes: Any) -> Manifest:
        names = tuple(page_name(number) for number in numbers)
        fields = {"epoch": self.epoch, "model": MODEL, "version": 1, "layout": self.layout, "blocks": names}
        return Manifest(transfer=os.urandom(8).hex(), **(fields | changes))


@contextmanager
def source_process(
    config: dict[str, Any], layout: str = LAYOUTS[0], pages: int = PAGES, width: int = 8
) -> Iterator[Source]:
    settings = {**config, "orders": f"127.0.0.1:{free_port('127.0.0.1')}"}
    argv = (sys.executable, "-m", "kv_migrate.pages", layout, str(pages), str(width), json.dumps(settings))
    places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:

        def tell(words: str) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            print(words, file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"

        try:
            assert process.stdout is not None
            yield Source(process, tell, *json.loads(process.stdout.readline()))
        finally:
            process.kill()
            process.wait(LIMIT_S)


@contextmanager
def source(config: dict[str, Any], layout: str = LAYOUTS[0], pages: int = PAGES, width: int = 8) -> Iterator[Source]:
    """The same in this process, where it has a thread of its own: it starts sooner."""
    with target(config, layout, pages, width) as scheduler:
        yield Source(None, scheduler.tell, *scheduler.introduce())


@contextmanager
def target(config: dict[str, Any], layout: str = LAYOUTS[0], pages: int = PAGES, width: int = 8) -> Iterator[Scheduler]:
    settings = HicacheSettings.read({**config, "orders": f"127.0.0.1:{free_port('127.0.0.1')}"})
    scheduler = Scheduler(settings, layout, pages, width)
    try:
        yield scheduler
    finally:
        scheduler.exchange.close()


@contextmanager
def two_ranks(config: dict[str, Any]) -> Iterator[list[Scheduler]]:
    settings = HicacheSettings.read({**config, "orders": f"127.0.0.1:{free_port('127.0.0.1', 2)}"})
    ranks = [Scheduler(settings, LAYOUTS[0], PAGES, rank=rank, ranks=2) for rank in range(2)]
    try:
        yield ranks
    finally:
        for scheduler in ranks:
            scheduler.exchange.close()


async def pull(scheduler: Scheduler, address: str, manifest: Manifest, deadline_s: float = LIMIT_S) -> KvPulled:
    """As the orders' server would, on the exchange's own loop."""
    return await scheduler.on_its_loop(scheduler.exchange.pull(address, manifest, deadline_s))


def fetched(scheduler: Scheduler, *numbers: int) -> list[bool]:
    """What SGLang gets for these pages, each of which has to be its own."""
    taken = scheduler.pool.alloc(len(numbers))
    came = scheduler.exchange.fetch([page_name(number) for number in numbers], taken)
    for number, page, here in zip(numbers, (taken[::PAGE_SLOTS] // PAGE_SLOTS).tolist(), came, strict=True):
        if here:
            assert scheduler.pool.read(page) == content(number, scheduler.pool.page_bytes), f"page {number} is wrong"
    return came


def all_numbers() -> str:
    return " ".join(map(str, range(PAGES)))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_pages_move_from_one_process_to_another(either: dict[str, Any], layout: str) -> None:
    with source_process(either, layout) as there, target(either, layout) as here:
        there.tell("write 3 1 4 2")
        assert here.exchange.present([page_name(1)]) == 0
        pulled = await pull(here, there.address, there.manifest(1, 2, 3))
        assert (pulled.blocks, pulled.bytes, pulled.damaged, pulled.reason) == (3, 3 * here.pool.page_bytes, 0, "")
        assert here.exchange.present([page_name(number) for number in (1, 2, 3, 4)]) == 3
        assert fetched(here, 1, 2, 3, 4) == [True, True, True, False]


@pytest.mark.parametrize("wanted", [(), (1,), (1, 2)])
async def test_pages_that_came_are_served_on(either: dict[str, Any], wanted: tuple[int, ...]) -> None:
    """Those that a request there has wanted lie in its pool by now; the others have just come."""
    with source(either) as first, target(either) as second, target(either) as third:
        first.tell("write 1 2")
        await pull(second, first.address, first.manifest(1, 2))
        for number in wanted:
            assert fetched(second, number) == [True]
        about = await second.exchange.about()
        pulled = await pull(third, about["address"], first.manifest(1, 2, epoch=about["epoch"]))
        assert (pulled.blocks, pulled.damaged, pulled.reason) == (2, 0, "")
        assert fetched(third, 1, 2) == [True, True]
        assert fetched(second, 1, 2) == [True, True]


async def test_peers_on_other_machines_know_each_other_by_certificates(config: dict[str, Any], tmp_path: Path) -> None:
    pki.init(tmp_path / "pki", "lab", 30)
    pki.issue(tmp_path / "pki", "a", pki.Kind.NODE, 10)
    named = [str(tmp_path / "pki" / file) for file in ("ca.pem", "a.pem", "a.key")]
    with source({**config, "certificates": named}) as there, target({**config, "certificates": named}) as here:
        there.tell("write 1")
        assert (await pull(here, there.address, there.manifest(1))).blocks == 1
        assert fetched(here, 1) == [True]


async def test_a_page_that_sglang_takes_back_while_it_is_read_is_dropped(either: dict[str, Any]) -> None:
    """The window on purpose: the offer is out and the bytes are not read yet, when the page is freed and written over."""
    with source_process(either) as there, target(either) as here:
        there.tell(f"write {all_numbers()}")
        rewritten = False

        def change(data: bytes, offset: int) -> bytes:
            nonlocal rewritten
            if offset >= 64 and not rewritten:  # what comes after the greeting: the offer
                rewritten = True
                there.tell("rewrite 2 5")
            return data

        async with between(there.address, change) as address:
            pulled = await pull(here, address, there.manifest(*range(PAGES)))
        assert rewritten
        assert (pulled.blocks, pulled.damaged, pulled.reason) == (PAGES - 2, 2, "")
        assert here.exchange.present([page_name(number) for number in range(PAGES)]) == 2
        assert fetched(here, 3, 4, 6) == [True, True, True]
        assert fetched(here, 5) == [False]


async def test_a_source_tells_of_no_page_that_was_taken_back_after_its_bytes_were_sent(config: dict[str, Any]) -> None:
    """Step by step: bytes and checksum of a page agree, and it is still not the page that was asked for."""
    with source(config) as there:
        there.tell("write 1 2")
        wanted = there.manifest(1, 2)
        pieces = tuple(name + bytes([0, number]) for name in wanted.blocks for number in range(2))
        wanted = there.manifest(layout=f"{there.layout}, rank 0", blocks=pieces)
        line = Line(Kind.TCP, there.address, SharedSecret(SECRET.encode()))
        try:
            async with asyncio.timeout(LIMIT_S):
                offer = await line.ask(Open(wanted, Kind.TCP, LIMIT_S), Offer)
                there.tell("rewrite 2")
                size = offer.block_bytes * len(pieces)
                await line.ask(Fetch(wanted.transfer, wanted.epoch, 0, size), Granted)
                data = await (await line.stream()).receive(size)
                sums = await line.ask(AskChecksums(wanted.transfer, wanted.epoch), Checksums)
        finally:
            line.close()
        assert offer.missing == ()
        half = size // 2
        assert data[:half] == content(1, half)
        assert data[half:] == content(2 + OTHER, half)
        assert sums.taken_back == (2, 3)


async def test_nothing_is_taken_of_a_pool_that_is_cleared_while_it_is_read(either: dict[str, Any]) -> None:
    with source(either) as there, target(either) as here:
        there.tell(f"write {all_numbers()}")
        cleared = False

        def change(data: bytes, offset: int) -> bytes:
            nonlocal cleared
            if offset >= 64 and not cleared:
                cleared = True
                there.tell("clear")
            return data

        async with between(there.address, change) as address:
            pulled = await pull(here, address, there.manifest(*range(PAGES)))
        assert (pulled.blocks, pulled.damaged) == (0, PAGES)
        assert here.exchange.present([page_name(0)]) == 0


async def test_a_page_that_is_written_a_moment_later_still_comes(either: dict[str, Any]) -> None:
    """SGLang writes what a stopped request has generated after it has answered that."""
    with source(either) as there, target(either) as here:
        there.tell("write 1")
        asked = asyncio.Event()

        def change(data: bytes, _: int) -> bytes:
            asked.set()
            return data

        async with between(there.address, change) as address:
            pulling = asyncio.ensure_future(pull(here, address, there.manifest(1, 2)))
            await asked.wait()
            there.tell("write 2")
            assert (await pulling).blocks == 2


async def test_a_bit_flipped_on_the_way_costs_that_page_only(config: dict[str, Any]) -> None:
    with source(config, width=512) as there, target(config, width=512) as here:
        there.tell("write 1 2 3")
        flipped = False

        def change(data: bytes, offset: int) -> bytes:
            nonlocal flipped
            if offset > here.pool.page_bytes * 3 // 2 and not flipped:
                flipped = True
                return bytes([data[0] ^ 1]) + data[1:]
            return data

        async with between(there.address, change) as address:
            pulled = await pull(here, address, there.manifest(1, 2, 3))
        assert flipped
        assert (pulled.blocks, pulled.damaged) == (2, 1)


async def test_a_source_killed_at_any_byte_costs_a_recompute(either: dict[str, Any]) -> None:
    """Before it greets, with its offer, and in the middle of the bytes; these go beside the connection with Mooncake, and
    there it is the checksums."""
    with target({**either, "silence_s": 0.3}, width=512) as here:
        for at in (1, 100, here.pool.page_bytes if either["transport"] is Kind.TCP else 200):
            with source_process(either, width=512) as there:
                there.tell("write 1 2 3")

                def change(data: bytes, offset: int, at: int = at, there: Source = there) -> bytes | None:
                    if offset + len(data) < at:
                        return data
                    there.signal(signal.SIGKILL)
                    return None

                async with between(there.address, change) as address:
                    pulled = await pull(here, address, there.manifest(1, 2, 3))
                assert (pulled.blocks, bool(pulled.reason)) == (0, True)
                assert here.exchange.present([page_name(1)]) == 0


async def test_a_frozen_source_is_given_up_and_left_alone_for_a_while(either: dict[str, Any]) -> None:
    with source_process(either) as there, target({**either, "silence_s": 0.3}) as here:
        there.tell("write 1")
        there.signal(signal.SIGSTOP)
        frozen = await pull(here, there.address, there.manifest(1))
        assert "nothing came from" in frozen.reason
        there.signal(signal.SIGCONT)
        again = await pull(here, there.address, there.manifest(1))
        assert "left alone" in again.reason
        assert here.exchange.present([page_name(1)]) == 0


async def test_a_slow_source_is_no_frozen_one(config: dict[str, Any]) -> None:
    """Silence is counted from the last byte: a transfer may take longer than the longest silence."""
    with source(config, width=768) as there, target({**config, "silence_s": 2.5}, width=768) as here:
        there.tell(f"write {all_numbers()}")

        def change(data: bytes, _: int) -> bytes:
            if len(data) > 4096:
                time.sleep(0.3)  # the pull has a thread of its own
            return data

        async with between(there.address, change) as address:
            pulled = await pull(here, address, there.manifest(*range(PAGES)))
        assert (pulled.blocks, pulled.reason) == (PAGES, "")
        assert pulled.seconds > 2.5


async def test_a_pull_that_waits_for_its_turn_does_not_take_its_source_for_a_frozen_one(either: dict[str, Any]) -> None:
    with source(either) as there, target({**either, "silence_s": 0.5}) as here:
        there.tell("write 1 2 3 4")
        await pull(here, there.address, there.manifest(4))  # an engine is there from now on
        for numbers in ((1, 2), (3,)):  # the second has to wait until the first is paid for
            rate = 2 * here.pool.page_bytes / 1.5
            resting = here.exchange.pull(there.address, there.manifest(*numbers), LIMIT_S, rate)
            pulled = await here.on_its_loop(resting)
            assert (pulled.blocks, pulled.reason) == (len(numbers), "")
        assert pulled.seconds > 1.0, "it did wait"


async def test_another_model_another_layout_and_another_epoch_are_refused(config: dict[str, Any]) -> None:
    with source(config) as there, target(config) as here:
        there.tell("write 1")
        assert "model another" in (await pull(here, there.address, there.manifest(1, model="another"))).reason
        assert "layout another" in (await pull(here, there.address, there.manifest(1, layout="another"))).reason
        assert "is over" in (await pull(here, there.address, there.manifest(1, epoch=there.epoch - 1))).reason
    with source(config, layout="layer_first") as there, target(config) as here:
        there.tell("write 1")
        other = there.manifest(1, layout=(await here.exchange.about())["layout"])
        assert "layer_first" in (await pull(here, there.address, other)).reason


async def test_what_carries_the_pages_is_said_with_the_reason_and_two_kinds_exchange_nothing(
    either: dict[str, Any],
) -> None:
    kind = either["transport"]
    other = Kind.TCP if kind is Kind.MOONCAKE_TCP else Kind.MOONCAKE_TCP
    need(other)
    with source(either) as there, target({**either, "transport": other}) as here:
        there.tell("write 1")
        about = await here.exchange.about()
        assert about["carrier"] == f"{other}: {other} was asked for"
        assert about["address"].startswith(f"{other}:127.0.0.1:")
        assert f"the transport here is {other}" in (await pull(here, there.address, there.manifest(1))).reason


def test_a_transport_that_cannot_be_had_ends_the_start(config: dict[str, Any]) -> None:
    if look(Kind.MOONCAKE).devices:
        pytest.skip("there is an RDMA device here")
    with pytest.raises(BadInput, match="RDMA device"), target({**config, "transport": Kind.MOONCAKE}):
        pass


async def test_whoever_does_not_know_the_secret_gets_no_page_and_gives_no_order(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("a secret of somebody else", encoding="utf-8")
    orders = f"127.0.0.1:{free_port('127.0.0.1')}"
    with source(config) as there, target({**config, "secret_file": str(tmp_path / "other")}) as stranger:
        there.tell("write 1")
        assert "secret" in (await pull(stranger, there.address, there.manifest(1))).reason
    scheduler = Scheduler(HicacheSettings.read({**config, "orders": orders}), LAYOUTS[0], PAGES)
    try:
        async with EngineClient.of_orders(f"http://{orders}", "wrong") as client:
            with pytest.raises(EngineRefused, match="401"):
                await client.kv_about()
        async with EngineClient.of_orders(f"http://{orders}", http_key(SECRET)) as client:
            assert await client.kv_about() == await scheduler.exchange.about()
    finally:
        scheduler.exchange.close()


async def test_orders_name_what_is_lacking_and_bring_it(config: dict[str, Any]) -> None:
    orders = f"127.0.0.1:{free_port('127.0.0.1')}"
    scheduler = Scheduler(HicacheSettings.read({**config, "orders": orders}), LAYOUTS[0], PAGES)
    try:
        with source(config) as there:
            there.tell("write 0 1 2")
            scheduler.write(0)
            async with EngineClient.of_orders(f"http://{orders}", http_key(SECRET)) as client:
                lack = await client.kv_lack([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3], 1)
                assert (lack.blocks, lack.missing) == (3, (page_name(1), page_name(2)))
                assert lack.layout == there.layout
                pulled = await client.kv_pull(there.address, there.manifest(blocks=lack.missing), LIMIT_S)
                assert (pulled.blocks, pulled.reason) == (2, "")
                assert (await client.kv_lack([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], 1)).missing == ()
                assert (await client.kv_lack([0, 0, 0, 0, 1, 1, 1, 1], 2)).missing == (page_name(0, 2), page_name(1, 2))
            assert fetched(scheduler, 1, 2) == [True, True]
    finally:
        scheduler.exchange.close()


async def test_each_rank_of_an_engine_moves_its_share_of_a_page(either: dict[str, Any]) -> None:
    with two_ranks(either) as source, two_ranks(either) as target:
        for rank, scheduler in enumerate(source):
            for number in (0, 1):
                scheduler.write(number)
                scheduler.pool.write(scheduler.where[number], number + 100 * rank)
        async with (
            EngineClient.of_orders(source[0].orders, http_key(SECRET)) as there,
            EngineClient.of_orders(target[0].orders, http_key(SECRET)) as here,
        ):
            about = await there.kv_about()
            assert about["address"].count("tcp:") == 2
            lack = await here.kv_lack([0, 0, 0, 0, 1, 1, 1, 1], 1)
            manifest = Manifest("m", about["epoch"], MODEL, 1, lack.layout, lack.missing)
            pulled = await here.kv_pull(about["address"], manifest, LIMIT_S)
            assert (pulled.blocks, pulled.bytes, pulled.reason) == (2, 4 * target[0].pool.page_bytes, "")
            swapped = ",".join(reversed(about["address"].split(",")))
            source[0].write(2)
            source[1].write(2)
            wrong = replace(manifest, transfer="n", blocks=(page_name(2),))
            assert "rank 0 was asked for" in (await here.kv_pull(swapped, wrong, LIMIT_S)).reason
            assert "has other ranks" in (await here.kv_pull(about["address"].split(",")[0], wrong, LIMIT_S)).reason
        for rank, scheduler in enumerate(target):
            taken = scheduler.pool.alloc(2)
            assert scheduler.exchange.fetch([page_name(0), page_name(1)], taken) == [True, True]
            for number, first in enumerate(taken[::PAGE_SLOTS].tolist()):
                share = content(number + 100 * rank, scheduler.pool.page_bytes)
                assert scheduler.pool.read(first // PAGE_SLOTS) == share


async def test_a_rank_that_does_not_answer_is_told(config: dict[str, Any]) -> None:
    with two_ranks(config) as ranks:
        ranks[1].exchange.close()
        async with EngineClient.of_orders(ranks[0].orders, http_key(SECRET)) as client:
            with pytest.raises(EngineRefused, match="not all ranks"):
                await client.kv_about()


async def test_without_room_for_all_the_start_of_the_prefix_is_taken(config: dict[str, Any]) -> None:
    page_bytes = TorchPool(LAYOUTS[0], 1, width=65536).page_bytes
    room = {**config, "keep_bytes": 2 * page_bytes}
    with source(config, pages=4, width=65536) as there, target(room, pages=4, width=65536) as here:
        there.tell("write 1 2 3")
        pulled = await pull(here, there.address, there.manifest(1, 2, 3))
        assert pulled.blocks == 2
        assert here.exchange.present([page_name(number) for number in (1, 2, 3)]) == 2


async def test_a_long_prefix_comes_in_shares(either: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small enough for a message; what has come stays when the source is lost before the end."""
    monkeypatch.setattr(page_exchange, "_SHARE_PIECES", 6)
    with source(either) as there, target({**either, "silence_s": 0.5}) as here:
        there.tell(f"write {all_numbers()}")
        assert (await pull(here, there.address, there.manifest(*range(PAGES)))).blocks == PAGES
        assert fetched(here, *range(PAGES)) == [True] * PAGES
    with source_process(either) as there, target({**either, "silence_s": 0.5}) as here:
        there.tell(f"write {all_numbers()}")
        seen, enough = 0, 8 * here.pool.page_bytes if either["transport"] is Kind.TCP else 450

        def change(data: bytes, _: int) -> bytes | None:
            nonlocal seen
            seen += len(data)
            if seen < enough:
                return data
            there.signal(signal.SIGKILL)
            return None

        async with between(there.address, change) as address:
            pulled = await pull(here, address, there.manifest(*range(PAGES)))
        assert pulled.reason == ""
        assert 3 <= pulled.blocks < PAGES
        assert here.exchange.present([page_name(number) for number in range(PAGES)]) == pulled.blocks


async def test_a_page_that_is_in_the_pool_already_is_given_from_there(config: dict[str, Any]) -> None:
    with target(config) as here:
        here.write(1)
        assert here.exchange.present([page_name(1), page_name(2)]) == 1
        assert fetched(here, 1, 2) == [True, False]


async def test_pages_are_no_arrivals_of_another_version(config: dict[str, Any]) -> None:
    with source(config) as there, target(config) as here:
        there.tell("write 1")
        await pull(here, there.address, there.manifest(1))
        assert here.exchange.present([page_name(1, version=2)]) == 0
        assert here.exchange.present([page_name(1)]) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"secret_file": None}, "secret_file"),
        ({"orders": "9001"}, "orders"),
        ({"transport": "rdma"}, "transport: 'rdma' is not allowed; one of auto, tcp, mooncake, mooncake-tcp"),
        ({"certificates": ["ca.pem"]}, "certificates"),
        ({"keep_bytes": 0}, "keep_bytes"),
        ({"silence_s": "long"}, "silence_s"),
    ],
    ids=str,
)
def test_settings_that_are_not_allowed_are_named(change: dict[str, Any], field: str) -> None:
    good = {"secret_file": "/a", "orders": "127.0.0.1:9001", "backend_name": "gyre"}
    assert HicacheSettings.read(good).silence_s == 0.45
    with pytest.raises(BadInput, match=field):
        HicacheSettings.read(good | change)


def test_the_options_for_sglang_say_the_settings() -> None:
    settings = HicacheSettings("/a/secret", "10.0.0.1:9001", model="m", silence_s=2.0)
    flags = hicache_flags(settings, 64)
    config = json.loads(flags[flags.index("--hicache-storage-backend-extra-config") + 1])
    assert HicacheSettings.read(config) == settings
    other = replace(settings, transport=Kind.MOONCAKE)
    assert HicacheSettings.read(json.loads(hicache_flags(other, 64)[-1])) == other
    assert (config["module_path"], config["prefetch_threshold"]) == ("gyre.kv_migrate.hicache", 64)
    assert config.keys().isdisjoint({"keep_bytes", "transport"})
    assert orders_url({"hicache_storage_backend_extra_config": json.dumps(config)}) == "http://10.0.0.1:9001"


def test_a_port_that_is_taken_ends_the_start(config: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = HicacheSettings.read({**config, "orders": f"127.0.0.1:{taken.getsockname()[1]}"})
        with pytest.raises(BadInput, match="must be free"):
            Scheduler(settings, LAYOUTS[0], PAGES)


def test_where_orders_go_is_read_from_sglangs_own_options() -> None:
    assert orders_url({"hicache_storage_backend_extra_config": '{"orders": "10.0.0.1:9001"}'}) == "http://10.0.0.1:9001"
    for other in (
        {},
        {"hicache_storage_backend_extra_config": None},
        {"hicache_storage_backend_extra_config": "@f.json"},
    ):
        assert orders_url(other) == ""
