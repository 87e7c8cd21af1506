"""What a cell's leaving, an engine's death and a change of weights do to answers in flight: they are slower, and whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre.actors.messages import DrainEngine, DrainReport
from gyre.ids import CellId

from .conftest import Proxy, StartProxy, until

ANSWER = "the quick brown fox jumps over the lazy dog"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def drain(proxy: Proxy, cell: str, *, move: bool = True) -> DrainReport:
    async with asyncio.timeout(10):
        return await proxy.gateway.drain(DrainEngine(CellId(cell), move))


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    return await start_proxy(lambda head: ANSWER, cells=("a", "b"), token_s=0.005)


async def test_a_call_on_a_leaving_cell_goes_on_elsewhere_with_its_tokens_and_its_kv(proxy: Proxy) -> None:
    await proxy.open("r")
    calling = asyncio.create_task(proxy.chat("r", [user("go")]))
    await proxy.until_sampled("a", 10)
    report = await drain(proxy, "a")
    assert (await calling)["content"] == ANSWER
    first, second = proxy.engines["a"].requests[0], proxy.engines["b"].requests[0]
    so_far = len(second["input_ids"]) - len(first["input_ids"])
    assert so_far > 0
    assert first["rid"] != second["rid"]
    assert second["sampling_params"]["max_new_tokens"] == first["sampling_params"]["max_new_tokens"] - so_far
    assert (report.requests, report.moved_blocks) == (1, len(second["input_ids"]) // 4)
    assert report.stop_s <= report.move_s
    assert len(proxy.engines["b"].pulls) == 1
    tree = proxy.session("r").tree
    assert proxy.engines["a"].text(list(tree.output_ids(tree.calls[0]))) == ANSWER + "<|im_end|>"
    trace = await proxy.close("r")
    assert (trace.continued_calls, trace.interrupted_calls, trace.prefix_tokens_recomputed) == (1, 0, 0)
    assert trace.max_silence_s > 0
    assert trace.calls == 1


async def test_a_drained_cell_gets_nothing_until_routes_say_that_it_accepts(proxy: Proxy) -> None:
    await proxy.open("r")
    await drain(proxy, "a")
    await proxy.chat("r", [user("1")])
    await proxy.route(closed=("a",))
    await proxy.chat("r", [user("2")])
    assert not proxy.engines["a"].requests
    await proxy.route()
    for place in range(8):
        await proxy.open(f"r{place}")
    await asyncio.gather(*(proxy.chat(f"r{place}", [user("3")]) for place in range(8)))
    assert proxy.engines["a"].requests


async def test_many_calls_leave_at_once_and_each_is_whole(proxy: Proxy) -> None:
    runs = [f"r{place}" for place in range(12)]
    for run in runs:
        await proxy.open(run)
    calling = [asyncio.create_task(proxy.chat(run, [user(run)])) for run in runs]
    await proxy.until_sampled("a", 5, requests=4)
    on_a = len(proxy.engines["a"].live)
    report = await drain(proxy, "a")
    assert report.requests == on_a
    assert not proxy.engines["a"].live
    assert [message["content"] for message in await asyncio.gather(*calling)] == [ANSWER] * 12
    for run in runs:
        assert (await proxy.close(run)).sampled_tokens == len(ANSWER) + 1


async def test_a_request_is_live_on_one_engine_at_a_time(proxy: Proxy) -> None:
    await proxy.open("r")
    calling = asyncio.create_task(proxy.chat("r", [user("go")]))
    cells = ["a", "b", "a", "b"]
    for leaving in cells:
        await proxy.until_sampled(leaving, 3)
        assert sum(len(engine.live) for engine in proxy.engines.values()) == 1
        await drain(proxy, leaving)
        await proxy.route()
    assert (await calling)["content"] == ANSWER
    assert sum(len(engine.requests) for engine in proxy.engines.values()) == 5
    assert len({request["rid"] for engine in proxy.engines.values() for request in engine.requests}) == 5


async def test_without_another_cell_the_call_waits_and_goes_on_at_the_next_version(proxy: Proxy) -> None:
    await proxy.open("r")
    await proxy.route(closed=("b",))
    calling = asyncio.create_task(proxy.chat("r", [user("go")]))
    await proxy.until_sampled("a", 10)
    report = await drain(proxy, "a", move=False)
    assert (report.requests, report.moved_blocks) == (1, 0)
    status = proxy.gateway.status()
    assert (status.calls_waiting, status.in_flight) == (1, {"a": 0, "b": 0})
    for engine in proxy.engines.values():
        engine.version = 1
    proxy.version = 1
    await proxy.route(closed=("b",))
    assert (await calling)["content"] == ANSWER
    tree = proxy.session("r").tree
    versions = list(tree.output_versions(tree.calls[0]))
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    trace = await proxy.close("r")
    assert (trace.prefix_tokens_recomputed, trace.lineages[0].lowest_version) == (0, 0)


async def test_an_engine_that_hangs_up_in_an_answer_loses_no_token_and_shows_no_error(proxy: Proxy) -> None:
    await proxy.open("r")
    proxy.engines["a"].hang_up_after = 12
    assert (await proxy.chat("r", [user("go")]))["content"] == ANSWER
    assert len(proxy.engines["b"].requests[0]["input_ids"]) - len(proxy.engines["a"].requests[0]["input_ids"]) == 12
    trace = await proxy.close("r")
    assert (trace.continued_calls, trace.interrupted_calls) == (1, 0)
    # It hung up on the call and lives: what it had computed is had from it. (An engine that is gone: test_local_engine.)
    assert trace.prefix_tokens_recomputed == 0


async def test_an_engine_that_cannot_be_reached_is_left_for_another(proxy: Proxy) -> None:
    await proxy.open("r")
    await proxy.engines["a"].stop()
    assert (await proxy.chat("r", [user("go")]))["content"] == ANSWER


async def test_the_only_engine_comes_back_and_the_call_goes_on(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: ANSWER, token_s=0.005)
    await proxy.open("r")
    engine = proxy.engines["a"]
    calling = asyncio.create_task(proxy.chat("r", [user("go")]))
    await proxy.until_sampled("a", 10)
    port = int(engine.url.rpartition(":")[2])
    await engine.stop()
    await asyncio.sleep(0.2)
    await engine.start(port)
    await proxy.route()
    assert (await calling)["content"] == ANSWER


async def test_a_run_between_calls_takes_its_kv_along(proxy: Proxy) -> None:
    await proxy.open("r")
    first = await proxy.chat("r", [user("go")])
    report = await drain(proxy, "a")
    assert report.requests == 0
    assert report.moved_blocks > 0
    await proxy.chat("r", [user("go"), {"role": "assistant", "content": first["content"]}, user("more")])
    trace = await proxy.close("r")
    assert (len(proxy.engines["b"].requests), trace.prefix_tokens_recomputed) == (1, 0)


async def test_a_prefix_that_could_not_be_moved_is_computed_again_and_counted(proxy: Proxy) -> None:
    await proxy.open("r")
    first = await proxy.chat("r", [user("go")])
    proxy.engines["a"].serves_kv = False
    await drain(proxy, "a", move=False)
    await proxy.chat("r", [user("go"), {"role": "assistant", "content": first["content"]}, user("more")])
    tree = proxy.session("r").tree
    known = tree.prompt_tokens(tree.calls[0]) + tree.output_tokens(tree.calls[0])
    assert (await proxy.close("r")).prefix_tokens_recomputed == (known - 1) // 4 * 4


async def test_a_stop_sequence_is_found_across_a_continuation(proxy: Proxy) -> None:
    await proxy.open("r")
    calling = asyncio.create_task(proxy.chat("r", [user("go")], stop=["brown fox"]))
    await proxy.until_sampled("a", len("the quick bro"))
    await drain(proxy, "a")
    assert (await calling)["content"] == "the quick "


async def test_max_tokens_counts_over_a_continuation(proxy: Proxy) -> None:
    await proxy.open("r")
    calling = asyncio.create_task(proxy.chat("r", [user("go")], max_tokens=30))
    await proxy.until_sampled("a", 10)
    await drain(proxy, "a")
    assert (await calling)["content"] == ANSWER[:30]
    assert (await proxy.close("r")).sampled_tokens == 30


async def test_an_engine_that_does_not_stop_is_left_and_the_call_goes_on(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.proxy.generation.STOP_S", 0.3)
    await proxy.open("r")
    engine = proxy.engines["a"]
    calling = asyncio.create_task(proxy.chat("r", [user("go")]))
    await proxy.until_sampled("a", 10)
    engine.deaf = True
    engine.held.clear()
    await drain(proxy, "a")
    assert (await calling)["content"] == ANSWER


async def test_an_engine_that_refuses_for_good_is_an_error_of_ours(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: ANSWER)
    await proxy.open("r")
    proxy.engines["a"].refuse_status = 400
    refusing = asyncio.create_task(proxy.post("r", "chat/completions", {"model": "m", "messages": [user("go")]}))
    async with asyncio.timeout(20):
        while not refusing.done():
            await proxy.route()  # forgive it, so that the test need not wait for that
            await asyncio.sleep(0.01)
    status, body = await refusing
    assert status == 503
    assert body["error"]["code"] == "engine_unavailable"
    proxy.engines["a"].refuse_status = 0
    assert (await proxy.chat("r", [user("go")]))["content"] == ANSWER
    trace = await proxy.close("r")
    assert (trace.interrupted_calls, trace.calls) == (1, 1)


async def test_a_call_that_waits_too_long_for_an_engine_is_told_so(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: ANSWER, wait_s=0.1)
    await proxy.open("r")
    await proxy.route(closed=("a",))
    status, body = await proxy.post("r", "messages", {"model": "m", "max_tokens": 5, "messages": [user("go")]})
    assert (status, body["error"]["type"]) == (503, "api_error")


async def test_whoever_waited_longest_is_seated_first(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: ANSWER)
    await proxy.route(closed=("a",))
    calling = []
    for place in range(5):
        await proxy.open(f"r{place}")
        calling.append(asyncio.create_task(proxy.chat(f"r{place}", [user(f"<{place}>")])))
        await until(lambda waiting=place + 1: proxy.gateway.status().calls_waiting == waiting)
    await proxy.route()
    await asyncio.gather(*calling)
    order = [request["rid"][:2] for request in proxy.engines["a"].requests]
    assert order == [f"r{place}" for place in range(5)]
    assert proxy.gateway.status().calls_waiting == 0


async def test_closing_a_run_ends_its_calls_on_the_engine(proxy: Proxy) -> None:
    await proxy.open("r")
    calling = asyncio.create_task(proxy.post("r", "chat/completions", {"model": "m", "messages": [user("go")]}))
    await proxy.until_sampled("a", 5)
    trace = await proxy.close("r")
    status, body = await calling
    assert (status, body["error"]["code"]) == (410, "run_closed")
    assert (trace.calls, trace.sampled_tokens) == (0, 0)
    assert not proxy.engines["a"].live
