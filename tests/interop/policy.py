"""The scripted policy: from a prompt's text it decides a whole answer in Qwen3's own format. Pure.

It has no memory. A prompt says which scenario it is of (the instruction does, and so do the summaries that the policy
writes) and how far it is: every answer bears the label of its step, `[plain 2]`. So it goes on where a run is,
whatever the harness has compacted, dropped or moved to a sub-agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .scenarios import SCENARIOS

TURN_END = "<|im_end|>"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent, which has no tool but its shell, is told that the work is done."""
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_SCENARIO = re.compile(r"GYRE-SCENARIO ([a-z-]+)")
_SUBTASK = re.compile(r"GYRE-SUBTASK ([a-z-]+)/(\d+)")
_AGENT = re.compile(r'"agent_id": ?"([^"]+)"')
_SUMMARY = re.compile(
    r"detailed summary of the conversation|CONTEXT CHECKPOINT COMPACTION|context summarization agent"
    r"|summarizes internal chat history",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Turn:
    speaker: str
    text: str


@dataclass(frozen=True)
class Decision:
    """`label` is unique among a run's answers, but for those to an equal prompt."""

    label: str
    role: str
    """`main`, `sub-agent`, `summary` or `auxiliary`."""
    answer: str
    token_s: float = 0.0
    mark: bool = False
    """Whether the driver wants to be told when half of it is said."""


def instruction(scenario: str) -> str:
    """The instruction of a run on this scenario."""
    return f"GYRE-SCENARIO {scenario}: do the steps of this scenario in the current folder, one after another."


def turns(prompt: str) -> list[Turn]:
    """The turns of a rendered prompt, the open one at its end aside."""
    return [Turn(found[1], found[2]) for found in _TURN.finditer(prompt)][:-1]


def tools(prompt: str) -> dict[str, Mapping[str, Any]]:
    """The tools of a rendered prompt: parameter schemas by name."""
    listed = _TOOLS.search(prompt)
    if listed is None:
        return {}
    functions = [json.loads(line)["function"] for line in listed[1].splitlines()]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def decide(prompt: str) -> Decision:
    said, known = turns(prompt), tools(prompt)
    system = "\n".join(_TOOLS.sub("", turn.text) for turn in said if turn.speaker == "system")
    rest = "\n".join(turn.text for turn in said if turn.speaker != "system")
    scenario = _SCENARIO.search(rest)
    asked = next((turn.text for turn in reversed(said) if turn.speaker == "user"), "")
    if _SUMMARY.search(system) or _SUMMARY.search(asked):
        return _summary(scenario, _SUBTASK.search(rest), rest)
    if not known:
        return Decision("title", "auxiliary", _answer("", "A title", ()))
    if scenario is not None:
        name, role, steps, serial = scenario[1], "main", SCENARIOS[scenario[1]].steps, ""
    else:
        subtask = _SUBTASK.search(rest)
        assert subtask is not None, "a prompt that is of no scenario"
        name, role, serial = subtask[1], "sub-agent", f"/{subtask[2]}"
        steps = SCENARIOS[name].nested_steps if len(subtask[2]) > 1 else SCENARIOS[name].sub_steps
    place = 1 + _reached(f"{name}{serial}", rest)
    label = f"{name}{serial} {place}"
    step = steps[min(place, len(steps) - 1)]
    last = (("run", SUBMIT),) if set(known) == {"bash"} else ()
    calls = [
        _call(f"{name}{serial}", kind, value, known, place, _AGENT.findall(rest)) for kind, value in step.calls or last
    ]
    text = f"[{label}] {step.text}"
    return Decision(label, role, _answer(f"Step {place} is {step.text!r}.", text, calls), step.token_s, step.mark)


def _reached(name: str, text: str) -> int:
    """The last step of which the text bears a label, -1 for none."""
    return max((int(found) for found in re.findall(rf"\[{re.escape(name)} (\d+)\]", text)), default=-1)


def _summary(scenario: re.Match[str] | None, subtask: re.Match[str] | None, rest: str) -> Decision:
    """Of a main thread, whose prompts name the scenario, or of a sub-agent, whose prompts do not."""
    if scenario is None and subtask is not None:
        what, name = "SUBTASK", f"{subtask[1]}/{subtask[2]}"
    else:
        what, name = "SCENARIO", scenario[1] if scenario else "none"
    place = _reached(name, rest)
    text = f"GYRE-{what} {name} goes on behind step [{name} {place}]. All files of the steps so far are written."
    text = (
        f"<analysis>\nNothing else matters.\n</analysis>\n\n<summary>\n{text}\n</summary>\n"
        f"<state_snapshot>\n<overall_goal>{text}</overall_goal>\n</state_snapshot>"
    )
    return Decision(f"{name} summary {place}", "summary", _answer("I sum up.", text, ()))


def _answer(thinking: str, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    said = "".join(
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )
    return f"<think>\n{thinking}\n</think>\n\n{text}{said}{TURN_END}"


def _call(
    scenario: str, kind: str, value: str, known: Mapping[str, Any], place: int, agents: Sequence[str]
) -> tuple[str, Mapping[str, Any]]:
    """A call of the tool that this harness has for it. `agents` are the names of the sub-agents of the background."""
    if kind == "write":
        return _write(value, f"{value} of {scenario}\n", known)
    if kind == "agent":
        return _agent(
            f"GYRE-SUBTASK {scenario.partition('/')[0]}/{value}: do the steps of this task and report.", value, known
        )
    if kind == "collect":
        if "wait_agent" not in known:  # it waits by itself
            return _shell("true", known, place)
        return "wait_agent", {"targets": [agents[int(value) - 1]], "timeout_ms": 60_000}
    return _shell(value, known, place)


def _shell(command: str, known: Mapping[str, Any], place: int) -> tuple[str, Mapping[str, Any]]:
    name = next(name for name in ("Bash", "run_shell_command", "bash", "exec_command", "shell") if name in known)
    wanted = set(known[name].get("properties", {}))
    field = "cmd" if "cmd" in wanted else "command"
    options: dict[str, Any] = {"description": f"Step {place}", "is_background": False, "timeout": 600_000}
    options["yield_time_ms"] = 30_000
    return name, {field: command, **{key: value for key, value in options.items() if key in wanted}}


def _write(name: str, content: str, known: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    return _shell(f"printf '%s' '{content}' > {name}", known, 0)


def _agent(prompt: str, value: str, known: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    for name, kind in (("Task", "general-purpose"), ("Agent", "general-purpose"), ("agent", "general-purpose")):
        if name in known:
            return name, {"description": f"Task {value}", "prompt": prompt, "subagent_type": kind}
    if "task" in known:
        return "task", {"description": f"Task {value}", "prompt": prompt, "subagent_type": "general"}
    return "spawn_agent", {"message": prompt}
