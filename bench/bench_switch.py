"""What a switch costs: the pause that a live request feels when its cell leaves, and the cell's own way between its roles.

The pause: the real gateway over two processes of the local engine, eight calls at the same time, each with a prefix of some
four thousand tokens of its own. One engine is drained; a call's pause is the time from its last token there to its first
elsewhere. Turns with the KV moved ahead and turns with all of it computed again take each other's place.

The role switch: a real engine and a real replica of a model of 100 MB, through the stages that a cell orders, against a plain
copy of as many bytes as its weights have.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import aiohttp
import torch
from row import Row
from safetensors.torch import load_file, save_file
from switch_parts import Engine, engines, replica, write_model

from gyre.actors.messages import (
    CloseRun,
    DrainEngine,
    EngineRoute,
    LoadSnapshot,
    Offload,
    Ok,
    OpenRun,
    Ready,
    SetRoutes,
)
from gyre.engine.client import EngineClient, GenerateRequest
from gyre.ids import CellId, GroupId, RunId
from gyre.proxy.gateway import Gateway, GatewayConfig
from gyre.train.snapshot import make_first_snapshot

POLICY = Path(__file__).parents[1] / "gyre" / "demo" / "policy"
CALLS = 8
PREFIX_WORDS = 2000
"""Each is two tokens."""
CONTEXT_TOKENS = 8192
ANSWER_TOKENS = 400
SAMPLED_S = 0.5
"""From the moment on when the engine has all calls."""
TURNS = 3
SWITCHES = 7
ASK_S = 120.0

NAMES = (
    "pause_moved_p50",
    "pause_moved_p99",
    "pause_recomputed_p50",
    "pause_recomputed_p99",
    "pause_recomputed_over_moved",
    "to_train_over_copy",
    "to_rollout_over_copy",
    *(f"stage_{name}" for name in ("release", "load_replica", "offload", "resume", "load_weights")),
)


def rows() -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as folder:
        moved, recomputed = asyncio.run(pauses(Path(folder)))
    for name, found in (("moved", moved), ("recomputed", recomputed)):
        yield Row(f"pause_{name}_p50", median(found), "s", "none", True)
        yield Row(f"pause_{name}_p99", quantiles(found, n=100)[98], "s", "none", True)
    ratio = median(recomputed) / median(moved)
    yield Row("pause_recomputed_over_moved", ratio, "x", ">= 3", ratio >= 3)
    with tempfile.TemporaryDirectory() as folder:
        stages, copy_s, step_s = asyncio.run(switches(Path(folder)))
    for name, parts in (
        ("to_train", ("release", "load_replica")),
        ("to_rollout", ("offload", "resume", "load_weights")),
    ):
        ratio = sum(stages[part] for part in parts) / (copy_s + step_s)
        yield Row(f"{name}_over_copy", ratio, "x", "<= 2", ratio <= 2)
    for name, took_s in stages.items():
        yield Row(f"stage_{name}", took_s / copy_s, "copies", "none", True)


# ------------------------------------------------------------------------------------------------ a live request's pause


async def pauses(folder: Path) -> tuple[list[float], list[float]]:
    """Of every call of every turn: with its KV moved, and with all computed again."""
    model = random_policy(folder / "model")
    found: dict[bool, list[float]] = {True: [], False: []}
    async with (
        engines(folder, model, ("a", "b"), "--cache-tokens", "131072") as cells,
        _gateway(folder, model, cells) as gateway,
    ):
        for turn in range(2 * TURNS):
            found[turn % 2 == 0] += await _turn(gateway, cells, f"t{turn}", move=turn % 2 == 0)
    return found[True], found[False]


def random_policy(folder: Path) -> Path:
    """The demo's policy with random weights: greedy answers are long."""
    shutil.copytree(POLICY, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": CONTEXT_TOKENS}
    (folder / "config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(7)
    weights = load_file(str(folder / "model.safetensors"))
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            weights[name] = torch.randn(tensor.shape, generator=noise) * 1.5 * tensor.shape[-1] ** -0.5
    save_file(weights, str(folder / "model.safetensors"))
    return folder


@asynccontextmanager
async def _gateway(folder: Path, model: Path, cells: dict[str, Engine]) -> AsyncGenerator[Gateway]:
    key = next(iter(cells.values())).key
    gateway = Gateway(
        GatewayConfig(folder / "journal", folder / "trajectories", model, CONTEXT_TOKENS, fsync=False, engine_key=key)
    )
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def _turn(gateway: Gateway, cells: dict[str, Engine], name: str, *, move: bool) -> list[float]:
    """All calls begin at `a`, which is drained while they stream. The pause of each."""

    async def route(*closed: str) -> None:
        routes = (
            EngineRoute(CellId(cell), engine.url, 1, cell not in closed, 2 * CALLS) for cell, engine in cells.items()
        )
        await gateway.set_routes(SetRoutes(1, tuple(routes)))

    async with _client(cells["a"]) as one, _client(cells["b"]) as other:
        await one.flush_cache()
        await other.flush_cache()
        await route("b")
        runs = [RunId(f"{name}-{place}") for place in range(CALLS)]
        for run in runs:
            await gateway.open_run(OpenRun(run, GroupId(name), 1, "key", "scripted", 0.0, ANSWER_TOKENS))
        async with aiohttp.ClientSession() as http:
            calls = [asyncio.create_task(_call(http, gateway, run)) for run in runs]
            while (await one.loads()).running < CALLS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(SAMPLED_S)
            await route()
            report = await gateway.drain(DrainEngine(CellId("a"), move))
            await asyncio.gather(*calls)
    assert report.requests == CALLS, "an answer had ended before"
    return [(await gateway.close_run(CloseRun(run, 1))).max_silence_s for run in runs]


def _client(engine: Engine) -> EngineClient:
    return EngineClient(engine.url, key=engine.key, control_s=ASK_S)


async def _call(http: aiohttp.ClientSession, gateway: Gateway, run: RunId) -> None:
    words = " ".join(str((place * 7 + int(run[-1])) % 10) for place in range(PREFIX_WORDS))
    body = {"model": "m", "messages": [{"role": "user", "content": words}]}
    async with http.post(f"{gateway.base_url}/run/{run}/key/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()


# ------------------------------------------------------------------------------------------------ a cell's switch


async def switches(folder: Path) -> tuple[dict[str, float], float, float]:
    """(seconds by stage, seconds of a plain copy of the weights, seconds of a decode step), the quickest of each."""
    model = folder / "model"
    shutil.copytree(POLICY, model)
    write_model(model)
    snapshot, _ = make_first_snapshot(model, folder / "snapshots")
    size = (snapshot / "model.safetensors").stat().st_size
    took: dict[str, float] = {}

    async def timed(name: str, doing: Awaitable[object]) -> None:
        started_s = perf_counter()
        await doing
        took[name] = min(took.get(name, float("inf")), perf_counter() - started_s)

    copy_s, there, here = float("inf"), bytearray(size), bytearray(size)
    async with (
        engines(folder, snapshot, ("a",)) as cells,
        replica(folder, model) as trained,
        _client(cells["a"]) as client,
    ):
        step_s = await _decode_step(client)
        for _ in range(SWITCHES):
            started_s = perf_counter()
            here[:] = there
            copy_s = min(copy_s, perf_counter() - started_s)
            await timed("release", client.release_memory())
            await timed("load_replica", trained.ask(LoadSnapshot(str(snapshot), 0), ASK_S, Ready))
            await timed("offload", trained.ask(Offload(), ASK_S, Ok))
            await timed("resume", client.resume_memory())
            await timed("load_weights", client.update_weights(str(snapshot), 1))
    return took, copy_s, step_s


async def _decode_step(client: EngineClient) -> float:
    """Between two tokens of an answer, the median."""
    request = GenerateRequest("step", tuple(range(16)), max_new_tokens=64, temperature=0.0, ignore_eos=True)
    times = [perf_counter() async for _ in client.generate(request)]
    return median(later - earlier for earlier, later in pairwise(times))
