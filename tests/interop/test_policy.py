"""The scripted policy reads from a prompt alone what to say next."""

from __future__ import annotations

import json

from .policy import SUBMIT, decide, instruction, tools, turns
from .scenarios import SCENARIOS

SHELL = {"type": "function", "function": {"name": "Bash", "parameters": {"properties": {"command": {}, "timeout": {}}}}}
AGENT = {"type": "function", "function": {"name": "Agent", "parameters": {"properties": {"prompt": {}}}}}
WAIT = {"type": "function", "function": {"name": "wait_agent", "parameters": {"properties": {"targets": {}}}}}


def prompt(*said: tuple[str, str], known: tuple[object, ...] = (SHELL, AGENT)) -> str:
    """As Qwen3's template has it."""
    listed = "\n".join(json.dumps(tool) for tool in known)
    system = f"You work.\n\n# Tools\n\n<tools>\n{listed}\n</tools>" if known else "You work."
    text = "".join(f"<|im_start|>{speaker}\n{text}<|im_end|>\n" for speaker, text in (("system", system), *said))
    return f"{text}<|im_start|>assistant\n"


def test_a_prompt_is_read_back() -> None:
    read = prompt(("user", "a"), ("assistant", "b\nc"))
    assert [(turn.speaker, turn.text) for turn in turns(read)][1:] == [("user", "a"), ("assistant", "b\nc")]
    assert set(tools(read)) == {"Bash", "Agent"}
    assert tools(prompt(known=())) == {}


def test_it_begins_with_the_first_step_and_goes_on_behind_the_last_one_that_it_sees() -> None:
    first = decide(prompt(("user", instruction("plain"))))
    assert (first.label, first.role) == ("plain 0", "main")
    assert first.answer.startswith("<think>\n")
    assert first.answer.endswith("</tool_call><|im_end|>")
    second = decide(prompt(("user", instruction("plain")), ("assistant", first.answer.removesuffix("<|im_end|>"))))
    assert second.label == "plain 1"
    assert second.answer.count("<tool_call>") == 2
    last = decide(prompt(("user", instruction("plain")), ("assistant", "[plain 1]")))
    assert (last.label, "<tool_call>" in last.answer) == ("plain 2", False)


def test_mini_swe_agent_is_told_by_its_shell_that_the_work_is_done() -> None:
    shell = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {}}}}}
    done = decide(prompt(("user", instruction("plain")), ("assistant", "[plain 1]"), known=(shell,)))
    assert json.dumps({"command": SUBMIT}) in done.answer


def test_a_sub_agent_has_steps_of_its_own() -> None:
    handed = decide(prompt(("user", instruction("sub-agent")), ("assistant", "[sub-agent 0]")))
    assert handed.answer.count("GYRE-SUBTASK sub-agent/") == 2
    sub = decide(prompt(("user", "GYRE-SUBTASK sub-agent/2: go")))
    assert (sub.label, sub.role) == ("sub-agent/2 0", "sub-agent")


def test_it_waits_for_the_agents_that_it_was_given() -> None:
    given = ("user", '<tool_response>\n{"agent_id":"x-1"}\n</tool_response>\n{"agent_id":"x-2"}')
    said = (("user", instruction("sub-agent")), ("assistant", "[sub-agent 2]"), given)
    waits = decide(prompt(*said, known=(SHELL, AGENT, WAIT)))
    assert '"targets": ["x-2"]' in waits.answer
    assert '"command": "true"' in decide(prompt(*said)).answer


def test_it_sums_up_and_goes_on_behind_its_summary_however_it_comes_back() -> None:
    asked = "Your task is to create a detailed summary of the conversation so far"
    said = (("user", instruction("compaction")), ("assistant", "[compaction 3]"), ("user", asked))
    summary = decide(prompt(*said, ("system", "a reminder")))
    assert (summary.role, summary.label) == ("summary", "compaction summary 3")
    after = decide(prompt(("user", summary.answer)))
    assert (after.role, after.label) == ("main", "compaction 4")


def test_without_tools_it_gives_a_title() -> None:
    assert decide(prompt(("user", instruction("plain")), known=())).role == "auxiliary"


def test_every_step_that_a_driver_acts_in_is_marked_and_slow_enough() -> None:
    for scenario in SCENARIOS.values():
        marked = [step for step in scenario.steps if step.mark]
        assert len(marked) == (scenario.meanwhile in ("switch in an answer", "kill in an answer"))
        assert all(step.token_s > 0 for step in marked)
