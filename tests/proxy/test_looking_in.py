"""What a run did can be seen from outside: live from its journal, and at its end in its trace and the gateway's metrics."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gyre.ids import CallId, RunId
from gyre.proxy.journal_writer import look_at_journal
from gyre.proxy.journals import find_journal, journals
from gyre.trajectory.replay import Replay, Use, replay

from .conftest import Proxy, StartProxy

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
ASK = "Your task is to create a detailed summary of the conversation so far"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def read(proxy: Proxy, run: str) -> Replay:
    place = find_journal(journals(proxy.gateway.config.journal_dir), run, None)
    return replay(look_at_journal(place.folder).records)


async def branching_run(proxy: Proxy) -> None:
    """A thread, a title, a sub-agent, a compaction, and a history that was rewritten by no rule."""
    await proxy.open("r")
    await proxy.chat("r", [system("You are a title generator."), user("Task.")])
    messages = [system("Main."), user("Task.")]
    answer = await proxy.chat("r", messages, tools=TOOLS)
    messages += [{"role": "assistant", "content": answer["content"]}, user("More.")]
    await proxy.chat("r", messages, tools=TOOLS)
    await proxy.chat("r", [system("Sub."), user("Look.")], tools=TOOLS)
    await proxy.chat("r", [*messages[:3], user(ASK)], tools=TOOLS)
    compacted = [system("Main."), user("This session is being continued."), *messages[2:]]
    await proxy.chat("r", compacted, tools=TOOLS)
    await proxy.chat("r", [*compacted[:3], user("Rewritten.")], tools=TOOLS)


FORKS = {"new-thread": 2, "compaction": 2, "unexplained": 1}


async def test_a_live_runs_journal_tells_its_tree_as_the_gateway_has_it(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: f"said {len(head)}")
    await branching_run(proxy)
    live, seen = proxy.session("r").tree, read(proxy, "r")
    assert seen.tree.calls == live.calls
    for call in live.calls:
        assert seen.tree.prompt_ids(call) == live.prompt_ids(call)
        assert seen.tree.output_ids(call) == live.output_ids(call)
        assert seen.tree.output_versions(call) == live.output_versions(call)
    assert seen.tree.select(5) == live.select(5)
    accounts = seen.accounts(5)
    assert [account.use for account in accounts.values()].count(Use.COUNTED) == 6
    assert accounts[CallId("r.1.0")].use is Use.AUXILIARY
    assert sum(account.counted_tokens for account in accounts.values()) == live.sampled_tokens - len(
        live.output_ids(CallId("r.1.0"))
    )
    # And so it stays when the run is closed, and its journal is put away.
    await proxy.close("r")
    assert read(proxy, "r").accounts(5) == accounts
    assert read(proxy, "r").closed is not None


async def test_forks_are_in_the_trace_and_the_metrics_and_an_unexplained_one_in_the_log(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(lambda head: f"said {len(head)}", metrics_key="k")
    with caplog.at_level(logging.WARNING):
        await branching_run(proxy)
    assert caplog.text.count("an unexplained fork") == 1
    assert "Rewritten." in caplog.text
    trace = await proxy.close("r")
    assert trace.forks == FORKS
    assert trace.faults == ()
    async with proxy.http.get(f"{proxy.gateway.base_url}/metrics", headers={"Authorization": "Bearer k"}) as response:
        metrics = await response.text()
    for cause, count in FORKS.items():
        assert f'gyre_forks_total{{cause="{cause}"}} {count}.0' in metrics
    assert "gyre_tree_faults_total 0.0" in metrics
    assert "gyre_journal_copy_behind_bytes 0.0" in metrics


async def test_a_breach_of_the_invariant_is_an_error_in_the_log_the_trace_and_the_metrics(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(lambda head: "said", metrics_key="k")
    await proxy.open("r")
    await proxy.chat("r", [user("Task.")])
    proxy.session("r").tree._radix.ids[0] += 1  # a token of the tree is not the one that was sent
    trace = await proxy.close("r")
    assert trace.faults == (
        "call r.1.0: the path to its answer is not the prompt it was given",
        "call r.1.0: its path does not end with the tokens that were sampled for it",
    )
    assert "its tree is not sound" in caplog.text
    assert b"gyre_tree_faults_total 2.0" in (proxy.gateway.metrics("Bearer k") or b"")
    assert RunId("r") not in proxy.gateway._runs
