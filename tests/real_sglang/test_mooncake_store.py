"""SGLang's own back end for a Mooncake Store, for who runs one: what one engine has computed, another finds in the store.

The master and the store's memory are on this machine, over the Transfer Engine's TCP. Nothing of ours moves a page here; what
Gyre does for it is to send the version as `extra_key`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engine.tiny_models import make_model
from kv_migrate.mooncake_library import PLACE, why_not

from gyre.engine.ports import free_port
from real_sglang.pair import PAGE_TOKENS, Engine, ready, start
from real_sglang.servers import MISSING
from real_sglang.test_two_engines import (
    FLAGS,
    NOISE,
    SHAPE,
    TOTAL,
    Pair,
    all_whole,
    clients,
    continued,
    prompt,
    sample,
    whole_blocks,
)

LIMIT_S = 60.0
KEYS = 2
"""Of a page in the store: one of K and one of V."""


@dataclass(frozen=True)
class Store:
    process: subprocess.Popen[bytes]
    address: str
    metrics: int

    def options(self) -> tuple[str, ...]:
        """Those of docs/kv-migration.md; over TCP, and with little memory."""
        config = {
            "master_server_address": self.address,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": 64 << 20,
            "extra_backend_tag": "a job",
            "prefetch_threshold": PAGE_TOKENS,
        }
        return (
            *("--served-model-name", "its model"),
            *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
            *("--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"),
            *("--hicache-storage-backend", "mooncake", "--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend-extra-config", json.dumps(config)),
        )

    def keys(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=LIMIT_S) as answer:
            text = answer.read().decode()
        return next(int(float(line.split()[1])) for line in text.splitlines() if line.startswith("master_key_count"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if MISSING or why_not():
        pytest.skip(MISSING or why_not())
    rpc, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
    argv = (
        PLACE / "site" / "mooncake" / "mooncake_master",
        "--rpc_address=127.0.0.1",
        f"--rpc_port={rpc}",
        f"--metrics_port={metrics}",
    )
    with (tmp_path_factory.mktemp("store") / "master.log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield Store(process, f"127.0.0.1:{rpc}", metrics)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def pair(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Their model lies in two places, as that of cells does which were started with different snapshots."""
    folder = tmp_path_factory.mktemp("pair")
    models = (make_model(folder / "v1", seed=1, **SHAPE), folder / "copy")
    shutil.copytree(*models)
    engines: list[Engine] = []
    try:
        for name, model in zip("ab", models, strict=True):
            engines.append(start(name, model, 1, folder, *FLAGS, store=store.options(), beside=(PLACE / "site",)))
        for engine in engines:
            ready(engine)
        yield Pair(engines[0], engines[1], folder, models)
    finally:
        for engine in engines:
            engine.end()


async def test_what_one_engine_has_computed_another_finds_in_the_store(pair: Pair, store: Store) -> None:
    prompts = [prompt(seed, 300) for seed in range(6)]
    async with clients(pair) as (a, b):
        empty = store.keys()
        whole = await all_whole(b, prompts, key=91)
        pages = len(prompts) * (whole_blocks(300 + TOTAL) // PAGE_TOKENS)
        starts = await asyncio.gather(*(sample(a, ids, TOTAL, 1, stop_after=20) for ids in prompts))
        so_far = [ids + start.token_ids for ids, start in zip(prompts, starts, strict=True)]
        pages += sum(whole_blocks(len(ids)) // PAGE_TOKENS for ids in so_far)
        while store.keys() < empty + KEYS * pages:  # noqa: ASYNC110 - another process' state
            await asyncio.sleep(0.05)
        assert (await sample(b, so_far[0], 1, 2)).cached_tokens == 0, "it is of another version"
        rests = await asyncio.gather(*(continued(b, *each, key=1) for each in zip(so_far, starts, strict=True)))
        for ids, start, rest, answer in zip(so_far, starts, rests, whole, strict=True):
            assert rest.cached_tokens == whole_blocks(len(ids))
            assert start.token_ids + rest.token_ids == answer.token_ids
            assert start.logprobs + rest.logprobs == pytest.approx(answer.logprobs, abs=NOISE)
        # Without its master the store has nothing, and the engines compute.
        store.process.kill()
        (right,) = await all_whole(a, [prompt(50, 300)], key=92)
        assert (await sample(b, prompt(50, 300), TOTAL, 1)).token_ids == right.token_ids
