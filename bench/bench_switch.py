"""What a switch costs: the pause that a live request feels when its cell leaves, and the cell's own way between its roles.

The pause: the real gateway over processes of the local engine, eight calls at the same time, each with a prefix of some four
thousand tokens of its own, which the engine has from a call before. It is drained while it samples; a call's pause is the
longest time without a token of it. Another engine takes the calls over with their KV, and in the next turn one whose blocks
are of another size, so that all of it has to be computed again.

The role switch: a real engine and a real replica of a model of 100 MB, through the stages that a cell orders, against a plain
copy of as many bytes as its weights have.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import aiohttp
from row import Row
from switch_parts import Engine, engines, replica, write_model

from gyre.actors.messages import CloseRun, DrainEngine, EngineRoute, Ok, OpenRun, SetRoutes
from gyre.actors.messages_replica import LoadSnapshot, Offload, Ready
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
TURNS = 2
SWITCHES = 7
PAUSE_MODEL = 256, 4
"""Hidden size and layers: 4 million parameters. The demo's own is so small that to compute a prefix costs as much as to move it."""
SWITCH_MODEL = 512, 8
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
    logging.getLogger("gyre").setLevel(
        logging.ERROR
    )  # that nothing can move in every other turn is told, and meant to be
    with tempfile.TemporaryDirectory() as folder:
        moved, recomputed = asyncio.run(pauses(Path(folder)))
    for name, found in (("moved", moved), ("recomputed", recomputed)):
        yield Row(f"pause_{name}_p50", median(found), "s", "none", True)
        yield Row(f"pause_{name}_p99", max(found), "s", "none", True)  # by nearest rank, the longest of so few
    ratio = median(recomputed) / median(moved)
    yield Row("pause_recomputed_over_moved", ratio, "x", ">= 3", ratio >= 3)
    with tempfile.TemporaryDirectory() as folder:
        stages, copy_s, step_s = asyncio.run(switches(Path(folder)))
    for name, parts in (
        ("to_train", ("release", "load_replica")),
        ("to_rollout", ("offload", "resume", "load_weights")),
    ):
        ratio = (sum(stages[part] for part in parts) - step_s) / copy_s
        yield Row(f"{name}_over_copy", ratio, "x", "<= 2", ratio <= 2)
    for name, took_s in stages.items():
        yield Row(f"stage_{name}", took_s / copy_s, "copies", "none", True)


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    shutil.copytree(POLICY, folder)
    write_model(folder, hidden, layers, CONTEXT_TOKENS)
    return folder


# ------------------------------------------------------------------------------------------------ a live request's pause


async def pauses(folder: Path) -> tuple[list[float], list[float]]:
    """Of every call of every turn: with its KV moved, and with all computed again."""
    model = make_model(folder / "model", *PAUSE_MODEL)
    found: dict[bool, list[float]] = {True: [], False: []}
    options = ("--cache-tokens", "49152")
    async with (
        engines(folder, model, ("a", "b"), *options) as cells,
        engines(folder, model, ("c",), *options, "--block-tokens", "32") as others,
        _gateway(folder, model, cells) as gateway,
    ):
        for turn in range(-2, 2 * TURNS):
            moved = turn % 2 == 0
            pauses = await _turn(
                gateway, {"a": cells["a"], **({"b": cells["b"]} if moved else others)}, f"t{turn}", moved
            )
            if turn >= 0:  # those before touched the memory
                found[moved] += pauses
    return found[True], found[False]


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


async def _turn(gateway: Gateway, cells: dict[str, Engine], name: str, moved: bool) -> list[float]:
    """All calls begin at the first of `cells`, which is drained while they stream, and go on at the second."""
    first, second = cells

    async def route(closed: str) -> None:
        routes = (EngineRoute(CellId(cell), engine.url, 1, cell != closed, 2 * CALLS) for cell, engine in cells.items())
        await gateway.set_routes(SetRoutes(1, tuple(routes)))

    async with _client(cells[first]) as one, _client(cells[second]) as other:
        await one.flush_cache()
        await other.flush_cache()
        await route(closed=second)
        await asyncio.gather(*(_call(gateway, f"{name}-before-{place}", 1) for place in range(CALLS)))
        calls = [asyncio.create_task(_call(gateway, f"{name}-{place}", ANSWER_TOKENS)) for place in range(CALLS)]
        while (await one.loads()).running < CALLS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(SAMPLED_S)
        await route(closed="")
        report = await gateway.drain(DrainEngine(CellId(first), False))
        pauses = await asyncio.gather(*calls)
    assert report.requests == CALLS, "an answer had ended before"
    assert (report.moved_blocks > 0) is moved
    return pauses


def _client(engine: Engine) -> EngineClient:
    return EngineClient(engine.url, key=engine.key, control_s=ASK_S)


async def _call(gateway: Gateway, name: str, answer_tokens: int) -> float:
    """A run of one call, whose prefix is the same wherever the name's last letter is; the longest time without a token."""
    run = RunId(name)
    await gateway.open_run(OpenRun(run, GroupId("bench"), 1, "key", "scripted", 0.0, answer_tokens))
    words = " ".join(str((place * 7 + int(name[-1])) % 10) for place in range(PREFIX_WORDS))
    body = {"model": "m", "messages": [{"role": "user", "content": words}]}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{gateway.base_url}/run/{run}/key/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
    return (await gateway.close_run(CloseRun(run, 1))).max_silence_s


# ------------------------------------------------------------------------------------------------ a cell's switch


async def switches(folder: Path) -> tuple[dict[str, float], float, float]:
    """(seconds by stage, seconds of a plain copy of the weights, seconds of a decode step), the quickest of each."""
    model = make_model(folder / "model", *SWITCH_MODEL)
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
