"""A cell that leaves takes no prefix with it, whatever begins, waits, moves or leaves at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre.actors.messages import DrainEngine, DrainReport
from gyre.ids import CellId
from gyre.proxy.departure import most_recent_first

from .conftest import Proxy, StartProxy, until

ANSWER = "the quick brown fox jumps over the lazy dog"
RUNS = ("x1 x", "x2 x", "x3 x", "x4 x", "x5 x", "y1 y", "z1 z")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def more(first: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    return [user("go"), {"role": "assistant", "content": first["content"]}, *(user(text) for text in texts)]


def draining(proxy: Proxy, cell: str) -> asyncio.Task[DrainReport]:
    return asyncio.create_task(proxy.gateway.drain(DrainEngine(CellId(cell), True)))


async def finished(drain: asyncio.Task[DrainReport]) -> DrainReport:
    """Its report, well before any of its limits."""
    async with asyncio.timeout(5):
        return await drain


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    return await start_proxy(lambda head: ANSWER, cells=("a", "b", "c"), token_s=0.002)


async def test_a_call_that_begins_while_its_cell_leaves_has_its_prefix_before_the_cell_is_gone(proxy: Proxy) -> None:
    await proxy.open("r")
    first = await proxy.chat("r", [user("go")])
    gates = proxy.engines["b"].pull_gates = [asyncio.Event(), asyncio.Event()]
    drain = draining(proxy, "a")
    await until(lambda: len(proxy.engines["b"].pulls) == 1)
    calling = asyncio.create_task(proxy.chat("r", more(first, "more")))
    await until(lambda: len(proxy.engines["b"].pulls) == 2)
    gates[0].set()
    await asyncio.sleep(0.05)
    assert not drain.done()
    gates[1].set()
    await finished(drain)
    await proxy.engines["a"].stop()
    await calling
    assert (await proxy.close("r")).prefix_tokens_recomputed == 0


async def test_a_call_on_its_way_to_a_cell_that_leaves_too_goes_on_to_another(proxy: Proxy) -> None:
    await proxy.open("r")
    calling = asyncio.create_task(proxy.chat("r", [user("go")]))
    await proxy.until_sampled("a", 10)
    gates = proxy.engines["b"].pull_gates = [asyncio.Event()]
    drains = [draining(proxy, "a")]
    await until(lambda: len(proxy.engines["b"].pulls) == 1)
    drains.append(draining(proxy, "b"))
    await asyncio.sleep(0.02)
    gates[0].set()
    for drain in drains:
        assert (await finished(drain)).requests == 1
    await proxy.engines["a"].stop()
    await proxy.engines["b"].stop()
    assert (await calling)["content"] == ANSWER
    assert not proxy.engines["b"].requests
    trace = await proxy.close("r")
    assert (trace.prefix_tokens_recomputed, trace.interrupted_calls) == (0, 0)


async def test_a_prefix_on_its_way_to_a_cell_that_leaves_too_is_taken_to_another(proxy: Proxy) -> None:
    await proxy.open("r")
    first = await proxy.chat("r", [user("go")])
    gates = proxy.engines["b"].pull_gates = [asyncio.Event()]
    drain = draining(proxy, "a")
    await until(lambda: len(proxy.engines["b"].pulls) == 1)
    await finished(draining(proxy, "b"))
    gates[0].set()
    await finished(drain)
    await proxy.engines["a"].stop()
    await proxy.engines["b"].stop()
    await proxy.chat("r", more(first, "more"))
    assert (await proxy.close("r")).prefix_tokens_recomputed == 0
    assert len(proxy.engines["c"].requests) == 1


async def test_the_prefix_of_a_call_that_waits_in_the_queue_is_taken_along(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: ANSWER, cells=("a", "b"))
    proxy.slots = 1
    await proxy.route()
    await proxy.open("r")
    first = await proxy.chat("r", [user("go")])
    for engine in proxy.engines.values():
        engine.held.clear()
    others = [f"o{place}" for place in range(4)]
    for run in others:
        await proxy.open(run, group="others")
    crowd = [asyncio.create_task(proxy.chat(run, [user(run)])) for run in others]
    await until(lambda: sum(len(engine.live) for engine in proxy.engines.values()) == 4)
    calling = asyncio.create_task(proxy.chat("r", more(first, "more")))
    await until(lambda: proxy.gateway.status().calls_waiting == 1)
    await finished(draining(proxy, "a"))
    await proxy.engines["a"].stop()
    proxy.engines["b"].held.set()
    assert (await calling)["content"] == ANSWER
    await asyncio.gather(*crowd)
    assert (await proxy.close("r")).prefix_tokens_recomputed == 0


async def test_the_main_threads_prefix_is_taken_along_though_a_sub_agent_asked_last(proxy: Proxy) -> None:
    await proxy.open("r")
    first = await proxy.chat("r", [user("go")])
    status, _ = await proxy.post(
        "r",
        "chat/completions",
        {"model": "m", "messages": [{"role": "system", "content": "You search."}, user("look")]},
        **{"x-claude-code-agent-id": "1"},
    )
    assert status == 200
    report = await finished(draining(proxy, "a"))
    tree = proxy.session("r").tree
    known = [tree.prompt_tokens(call) + tree.output_tokens(call) for call in tree.calls]
    assert report.moved_blocks == sum((tokens - 1) // 4 for tokens in known)
    await proxy.engines["a"].stop()
    await proxy.chat("r", more(first, "more"))
    assert (await proxy.close("r")).prefix_tokens_recomputed == 0


async def test_the_run_that_was_answered_last_is_moved_first_and_who_waits_for_an_engine_before_all(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(lambda head: ANSWER, cells=("a",))
    runs = [f"r{place}" for place in range(12)]
    firsts: dict[str, dict[str, Any]] = {}
    for run in runs:
        await proxy.open(run)
        firsts[run] = await proxy.chat(run, [user(f"go, {run}")])
    await proxy.chat("r3", [user("go, r3"), {"role": "assistant", "content": firsts["r3"]["content"]}, user("more")])
    found = most_recent_first(proxy.gateway._resting(CellId("a"), 0))
    assert [prefix.run for prefix in found] == ["r3", *(run for run in reversed(runs) if run != "r3")]
    await proxy.route(closed=("a",))
    waiting = asyncio.create_task(
        proxy.chat("r5", [user("go, r5"), {"role": "assistant", "content": firsts["r5"]["content"]}, user("more")])
    )
    await until(lambda: proxy.gateway.status().calls_waiting == 1)
    found = most_recent_first(proxy.gateway._resting(CellId("a"), 0))
    assert [prefix.run for prefix in found][:3] == ["r5", "r3", "r11"]
    await proxy.route()
    await waiting


async def test_a_departure_begins_with_the_runs_that_were_answered_last(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: ANSWER, cells=("a", "b"))
    await proxy.route(closed=("b",))
    for place in (5, 11, 2, 8, 0, 9, 3, 10, 1, 7, 4, 6):
        await proxy.open(f"r{place}")
        await proxy.chat(f"r{place}", [user("go" + 4 * place * "x")])  # each has a block more than the one below
    await proxy.route()
    gate = asyncio.Event()
    proxy.engines["b"].pull_gates = [gate] * 8
    drain = draining(proxy, "a")
    await until(lambda: len(proxy.engines["b"].pulls) == 8)
    gate.set()
    await finished(drain)
    sizes = [len(pull["manifest"]["blocks"]) for pull in proxy.engines["b"].pulls]
    assert {size - min(sizes) for size in sizes[:8]} == {0, 9, 3, 10, 1, 7, 4, 6}
    assert {size - min(sizes) for size in sizes[8:]} == {5, 11, 2, 8}


async def test_prefixes_that_rest_have_a_rate_and_what_a_request_waits_for_has_none(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: ANSWER, cells=("a", "b"), token_s=0.002, resting_kv_mib_s=3, metrics_key="m")
    for run in ("rests", "asks"):
        await proxy.open(run)
    await proxy.route(closed=("b",))
    await proxy.chat("rests", [user("go")])
    calling = asyncio.create_task(proxy.chat("asks", [user("go on")]))
    await proxy.until_sampled("a", 10)
    await proxy.route()
    report = await finished(draining(proxy, "a"))
    await calling
    assert sorted(pull["bytes_s"] for pull in proxy.engines["b"].pulls) == [0, 3 << 20]
    key = {"Authorization": "Bearer m"}
    async with proxy.http.get(f"{proxy.gateway.base_url}/metrics", headers=key) as response:
        text = await response.text()
    told = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("gyre_kv_"))
    moved = {whose: float(told[f'gyre_kv_moved_blocks_total{{for="{whose}"}}']) for whose in ("request", "resting")}
    assert min(moved.values()) > 0
    assert sum(moved.values()) == report.moved_blocks
    for whose, blocks in moved.items():
        assert float(told[f'gyre_kv_moved_tokens_total{{for="{whose}"}}']) == 4 * blocks
        assert float(told[f'gyre_kv_moved_bytes_total{{for="{whose}"}}']) == 10 * blocks
        assert float(told[f'gyre_kv_move_seconds_count{{end="whole",for="{whose}"}}']) == 1


async def test_a_prefix_that_is_computed_again_is_counted_once_and_not_where_the_call_was_stopped_before(
    proxy: Proxy,
) -> None:
    await proxy.open("r")
    first = await proxy.chat("r", [user("go")])
    proxy.engines["a"].serves_kv = False
    proxy.engines["b"].held.clear()
    await finished(draining(proxy, "a"))
    calling = asyncio.create_task(proxy.chat("r", more(first, "more")))
    await until(lambda: bool(proxy.engines["b"].live))
    await finished(draining(proxy, "b"))
    await calling
    tree = proxy.session("r").tree
    known = tree.prompt_tokens(tree.calls[0]) + tree.output_tokens(tree.calls[0])
    assert (await proxy.close("r")).prefix_tokens_recomputed == (known - 1) // 4 * 4


async def test_an_engine_takes_no_more_than_twice_its_slots_and_groups_share_what_comes_free(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(lambda head: ANSWER)
    proxy.slots = 1
    await proxy.route()
    engine = proxy.engines["a"]
    engine.held.clear()
    calling: list[asyncio.Task[Any]] = []
    for place, (run, group) in enumerate(name.split() for name in RUNS):
        await proxy.open(run, group=group)
        calling.append(asyncio.create_task(proxy.chat(run, [user(run)])))
        await until(lambda place=place: len(engine.live) + proxy.gateway.status().calls_waiting == place + 1)
    assert len(engine.live) == 2
    engine.held.set()
    await asyncio.gather(*calling)
    assert [request["rid"][:2] for request in engine.requests] == ["x1", "x2", "y1", "z1", "x3", "x4", "x5"]
