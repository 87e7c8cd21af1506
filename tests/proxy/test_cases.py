"""The cases that are the proxy's: C7, C8, C12, C14 to C18, and what is of their kind."""

from __future__ import annotations

import asyncio
import json
from array import array
from itertools import pairwise
from typing import Any

import pytest

from gyre.ids import CallId
from gyre.trajectory.records import LineageRole

from .conftest import Proxy, StartProxy, until

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


def tool_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def assert_extends(proxy: Proxy, run: str, first: CallId, then: CallId) -> None:
    """The invariant of a lineage: the next prompt begins with the previous prompt and output, token for token."""
    tree = proxy.session(run).tree
    known = tree.prompt_ids(first) + tree.output_ids(first)
    assert tree.prompt_ids(then)[: len(known)] == known


async def assert_one_lineage(proxy: Proxy, run: str) -> None:
    tree = proxy.session(run).tree
    assert not tree.check()
    calls = tree.calls
    for first, then in pairwise(calls):
        assert_extends(proxy, run, first, then)
    assert not tree.forks
    assert len((await proxy.close(run)).lineages) == 1


async def test_c7_thinking_dropped_and_arguments_written_anew_is_one_lineage(start_proxy: StartProxy) -> None:
    def script(head: str) -> str:
        turn = head.count("<tool_response>")
        if turn == 7:
            return "All done."
        return f"<think>\nStep {turn}, say.\n</think>\n\nI go on. " + tool_call(f'{{"b": {turn}.0, "a":  "x\\u0041"}}')

    proxy = await start_proxy(script, thinking=True)
    await proxy.open("r")
    messages = [system("An agent."), user("Work.")]
    for turn in range(7):
        message = await proxy.chat("r", messages, tools=TOOLS)
        assert message["reasoning_content"] == f"Step {turn}, say."
        call = message["tool_calls"][0]
        rewritten = json.dumps({"a": "xA", "b": turn}, separators=(",", ":"))
        back = {**call, "function": {"name": "bash", "arguments": rewritten}}
        messages += [
            {"role": "assistant", "content": message["content"].strip(), "tool_calls": [back]},
            result(call, f"out {turn}"),
        ]
    assert (await proxy.chat("r", messages, tools=TOOLS))["content"] == "All done."
    assert len(proxy.session("r").tree.calls) == 8
    await assert_one_lineage(proxy, "r")


async def test_c7_a_turn_without_tool_calls_is_known_by_what_it_says(start_proxy: StartProxy) -> None:
    def script(head: str) -> str:
        return f"<think>\nhm\n</think>\n\n  answer {head.count('<|im_start|>user')}\n"

    proxy = await start_proxy(script, thinking=True)
    await proxy.open("r")
    messages = [user("one")]
    for text in ("two", "three"):
        message = await proxy.chat("r", messages)
        messages += [{"role": "assistant", "content": message["content"].strip()}, user(text)]
    await proxy.chat("r", messages)
    await assert_one_lineage(proxy, "r")


async def test_c7_a_tool_renamed_by_the_harness_is_still_the_sampled_call(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "ok" if "<tool_response>" in head else tool_call('{"x": 1}'))
    await proxy.open("r")
    message = await proxy.chat("r", [user("go")], tools=TOOLS)
    back = {
        "id": message["tool_calls"][0]["id"],
        "type": "function",
        "function": {"name": "invalid", "arguments": "{}"},
    }
    messages = [user("go"), {"role": "assistant", "content": None, "tool_calls": [back]}, result(back, "no such tool")]
    await proxy.chat("r", messages, tools=TOOLS)
    await assert_one_lineage(proxy, "r")


async def test_c7_a_truncated_answer_is_closed_and_gone_on_with(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "<think>\nlong thought\n</think>\n\nyes", thinking=True)
    await proxy.open("r")
    for limit in (6, 20):  # inside the thought, and behind it
        first = await proxy.chat("r", [user(f"go {limit}")], max_tokens=limit)
        await proxy.chat("r", [user(f"go {limit}"), {"role": "assistant", "content": first["content"]}, user("on")])
        calls = proxy.session("r").tree.calls
        assert_extends(proxy, "r", calls[-2], calls[-1])
    assert len((await proxy.close("r")).lineages) == 2


async def test_c8_a_background_sub_agent_has_a_lineage_and_a_role_of_its_own(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: f"said {len(head)}")
    await proxy.open("r")
    threads = {"A": [system("You are the main agent."), user("Task.")], "B": [system("You search."), user("Look.")]}
    for name in ("A", "B", "A", "B"):
        message = await proxy.chat("r", threads[name], tools=TOOLS)
        threads[name] += [{"role": "assistant", "content": message["content"]}, user("go on")]
    a1, b1, a2, b2 = proxy.session("r").tree.calls
    assert_extends(proxy, "r", a1, a2)
    assert_extends(proxy, "r", b1, b2)
    lineages = (await proxy.close("r")).lineages
    assert [lineage.role for lineage in lineages] == [LineageRole.MAIN, LineageRole.SUB_AGENT]


async def test_c12_a_cell_gets_no_request_until_it_reports_the_authoritative_version(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "hi", cells=("a", "b"))
    proxy.version = 7
    proxy.engines["a"].version = 7
    await proxy.route(versions={"b": 0})
    await proxy.open("r")
    for place in range(4):
        await proxy.chat("r", [user(f"{place}")])
    assert (len(proxy.engines["a"].requests), len(proxy.engines["b"].requests)) == (4, 0)
    await proxy.route(closed=("a",), versions={"b": 0})
    waiting = asyncio.create_task(proxy.chat("r", [user("now")]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert proxy.gateway.status().calls_waiting == 1
    proxy.engines["b"].version = 7
    await proxy.route(closed=("a",))
    assert (await waiting)["content"] == "hi"
    assert len(proxy.engines["b"].requests) == 1


async def test_c14_every_request_names_the_version_whose_cache_it_may_use(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "hi")
    await proxy.open("r")
    await proxy.chat("r", [user("1")])
    proxy.version = proxy.engines["a"].version = 1
    await proxy.route()
    await proxy.chat("r", [user("2")])
    assert [request["extra_key"] for request in proxy.engines["a"].requests] == ["0", "1"]
    tree = proxy.session("r").tree
    assert [set(tree.output_versions(call)) for call in tree.calls] == [{0}, {1}]


async def test_c15_turns_kept_behind_a_summary_are_context_there_with_their_own_tokens(start_proxy: StartProxy) -> None:
    def script(head: str) -> str:
        if "TEXT ONLY" in head:
            return "<summary>did things</summary>"
        return "<think>\nstep\n</think>\n\n" + tool_call('{"i":   1.0}')

    proxy = await start_proxy(script, thinking=True)
    await proxy.open("r", profile="claude-code")
    messages = [system("Main."), user("Task.")]
    answers: list[list[dict[str, Any]]] = []
    for turn in range(3):
        message = await proxy.chat("r", messages, tools=TOOLS)
        assistant = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
        answers.append([assistant, result(message["tool_calls"][0], f"out {turn}")])
        messages += answers[-1]
    ask = "CRITICAL: Respond with TEXT ONLY. Your task is to create a detailed summary of the conversation so far"
    await proxy.chat("r", [*messages, user(ask)], tools=TOOLS)
    compacted = [
        system("Main."),
        user("This session is being continued. Summary: did things"),
        *answers[-1],
        user("Go on."),
    ]
    await proxy.chat("r", compacted, tools=TOOLS)
    tree = proxy.session("r").tree
    kept, after = tree.calls[2], tree.calls[4]
    prompt = tree.prompt_ids(after)
    assert contains(prompt, tree.output_ids(kept)), "the kept turn stands behind the new prefix as it was sampled"
    trace = await proxy.close("r")
    assert [lineage.role for lineage in trace.lineages] == [
        LineageRole.MAIN,
        LineageRole.MAIN_SUMMARY,
    ]
    # Trained where it was sampled, and only there: each of the five answers once.
    assert trace.counted_tokens == sum(tree.output_tokens(call) for call in tree.calls)


def contains(whole: array[int], part: array[int]) -> bool:
    return any(whole[start : start + len(part)] == part for start in range(len(whole) - len(part) + 1))


@pytest.mark.parametrize("swapped", [False, True])
async def test_c16_parallel_results_in_either_order_are_one_lineage(start_proxy: StartProxy, swapped: bool) -> None:
    both = tool_call('{"n": 1}') + "\n" + tool_call('{"n": 2}')
    proxy = await start_proxy(lambda head: "done" if "<tool_response>" in head else both)
    await proxy.open("r")
    message = await proxy.chat("r", [user("go")], tools=TOOLS)
    first, second = message["tool_calls"]
    assistant = {"role": "assistant", "content": None, "tool_calls": [first, second]}
    results = [result(first, "one"), result(second, "two")]
    messages = [user("go"), assistant, *(results[::-1] if swapped else results)]
    answer = await proxy.chat("r", messages, tools=TOOLS)
    messages = [user("go"), assistant, *results, {"role": "assistant", "content": answer["content"]}, user("more")]
    await proxy.chat("r", messages, tools=TOOLS)
    last = proxy.session("r").tree.calls[-1]
    text = proxy.engines["a"].text(list(proxy.session("r").tree.prompt_ids(last)))
    assert text.index("one") < text.index("two")
    await assert_one_lineage(proxy, "r")


VOLATILE = [
    "x-anthropic-billing-header: cc_version=2.1.220.{0}; cc_entrypoint=cli\nYou are an agent.",
    "You are an agent. Today's date: 2026-11-{1}.\nCurrent time 1{2}:05:09",
    "You are an agent.\ngitStatus: This is the git status.\nCurrent branch: main\n M file{2}.py\n\nRecent commits:\n{0}af31 x",
    "You are an agent in session 0f8fad5b-d9cb-469f-a165-70867728950{2}.",
]


@pytest.mark.parametrize("template", VOLATILE)
async def test_c17_a_volatile_token_in_the_system_prompt_does_not_fork_the_tree(
    start_proxy: StartProxy, template: str
) -> None:
    proxy = await start_proxy(lambda head: "ok")
    await proxy.open("r")
    messages = [system(template.format("316", "28", "1")), user("Task.")]
    for hex3, day, digit in (("28f", "29", "2"), ("def", "30", "3"), ("b7d", "27", "4")):
        message = await proxy.chat("r", messages)
        messages = [system(template.format(hex3, day, digit)), *messages[1:]]
        messages += [{"role": "assistant", "content": message["content"]}, user(f"more {digit}")]
    await proxy.chat("r", messages)
    # Another thread of the run shares what they have in common: the pinned system prompt.
    await proxy.chat("r", [messages[0], user("Other.")])
    tree = proxy.session("r").tree
    assert len(tree.calls) == 5
    for first, then in zip(tree.calls[:3], tree.calls[1:4], strict=True):
        assert_extends(proxy, "r", first, then)
    text = proxy.engines["a"].text(list(tree.prompt_ids(tree.calls[-1])))
    assert "billing" not in text
    opening = tree.prompt_ids(tree.calls[0])
    other = tree.prompt_ids(tree.calls[-1])
    shared = next(place for place in range(len(other)) if opening[place] != other[place])
    assert proxy.engines["a"].text(list(opening[:shared])).endswith("<|im_start|>user\n")


async def test_c17_a_system_prompt_that_says_something_else_is_another_thread(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "ok")
    await proxy.open("r")
    await proxy.chat("r", [system("You are an agent."), user("Task.")])
    back = [{"role": "assistant", "content": "ok"}, user("more")]
    await proxy.chat("r", [system("You are a critic."), user("Task."), *back])
    assert len((await proxy.close("r")).lineages) == 2


async def test_c18_a_retry_joins_the_call_that_still_decodes(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "a long answer")
    engine = proxy.engines["a"]
    engine.held.clear()
    await proxy.open("r")
    body = {"model": "m", "messages": [user("go")], "temperature": 0.5, "max_tokens": 8000, "stream": False}
    other_order = dict(reversed(list({**body, "max_tokens": 64000}.items())))
    first = asyncio.create_task(proxy.post("r", "chat/completions", body))
    await proxy.until_sampled("a", 0)
    second = asyncio.create_task(proxy.post("r", "chat/completions", other_order))
    await asyncio.sleep(0.1)
    engine.held.set()
    answers = await asyncio.gather(first, second)
    assert answers[0] == answers[1]
    assert answers[0][1]["choices"][0]["message"]["content"] == "a long answer"
    assert len(engine.requests) == 1
    trace = await proxy.close("r")
    assert (trace.calls, trace.sampled_tokens) == (1, len("a long answer") + 1)


async def test_c18_a_retry_of_an_ended_call_is_answered_again_with_the_same_ids(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: tool_call('{"x": 1}'))
    await proxy.open("r")
    first = await proxy.chat("r", [user("go")], tools=TOOLS)
    assert await proxy.chat("r", [user("go")], tools=TOOLS) == first
    assert len(proxy.engines["a"].requests) == 1
    assert await proxy.chat("r", [user("go on")], tools=TOOLS) != first


async def dropped(proxy: Proxy, body: dict[str, Any], after_tokens: int) -> None:
    """A request whose client goes away in the middle of the answer."""
    asking = asyncio.create_task(proxy.post("r", "chat/completions", body))
    await proxy.until_sampled("a", after_tokens)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_c18_the_retry_of_a_dropped_request_goes_on_from_the_tokens_so_far(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "0123456789" * 4, token_s=0.01)
    await proxy.open("r")
    body = {"model": "m", "messages": [user("go")]}
    engine = proxy.engines["a"]
    await dropped(proxy, body, after_tokens=5)
    await until(lambda: not engine.live)  # the engine is told at once that nobody waits any more
    status, answer = await proxy.post("r", "chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "0123456789" * 4)
    first, second = engine.requests
    so_far = second["input_ids"][len(first["input_ids"]) :]
    assert len(so_far) >= 5
    assert ("0123456789" * 4).startswith(engine.text(so_far))
    tree = proxy.session("r").tree
    assert (len(tree.calls), tree.output_tokens(tree.calls[0])) == (1, 41)


async def test_an_answer_that_reached_nobody_is_kept_out_of_training(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "0123456789", token_s=0.01)
    await proxy.open("r")
    await dropped(proxy, {"model": "m", "messages": [user("go")]}, after_tokens=2)
    await proxy.chat("r", [user("else")])
    trace = await proxy.close("r")
    assert (trace.calls, trace.sampled_tokens, trace.counted_tokens) == (1, 11, 11)
