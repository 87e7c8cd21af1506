"""What the scripted policy does in each scenario, step by step, and what the driver does meanwhile.

A step is one answer: a text, and calls of whatever tools the harness has for them. `write` makes a file in the
workspace, `run` runs a command there, `agent` hands a task to a sub-agent, `collect` waits for those of the
background. The last step ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Meanwhile = Literal["nothing", "switch in an answer", "switch in a tool call", "kill in an answer"]

WAITING = "waiting"
GO = "go"
UNTIL_GO = f"touch {WAITING}; until [ -e {GO} ]; do sleep 0.05; done; echo released"


@dataclass(frozen=True)
class Step:
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    token_s: float = 0.0
    """The least time that each of its tokens takes."""
    mark: bool = False
    """Whether the driver acts when half of it is said."""


@dataclass(frozen=True)
class Scenario:
    steps: tuple[Step, ...]
    files: Mapping[str, str]
    """What must be in the workspace at the end."""
    sub_steps: tuple[Step, ...] = ()
    nested_steps: tuple[Step, ...] = ()
    """Of a sub-agent's sub-agent, whose task has a number of two digits."""
    meanwhile: Meanwhile = "nothing"
    context_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """By harness: of a model with so short a context that it must compact. Else as many as the engines take."""
    lineages: Mapping[str, int] = field(default_factory=lambda: {"main": 1})
    """How many of each role there are at the end."""


DONE = Step("All is done.")
LONG = " ".join(f"Word {number} of a long answer." for number in range(12))

SCENARIOS: Mapping[str, Scenario] = {
    "plain": Scenario(
        steps=(
            Step("First a file.", (("write", "one.txt"),)),
            Step("Two at once.", (("run", "echo two > two.txt; echo a"), ("run", "echo b"))),
            DONE,
        ),
        files={"one.txt": "one.txt of plain\n", "two.txt": "two\n"},
    ),
    "answer": Scenario(
        steps=(
            Step("First a file.", (("write", "one.txt"),)),
            Step(LONG, (("run", "echo two > two.txt"),), token_s=0.03, mark=True),
            DONE,
        ),
        files={"one.txt": "one.txt of answer\n", "two.txt": "two\n"},
        meanwhile="switch in an answer",
    ),
    "tool": Scenario(
        steps=(
            Step("First a file.", (("write", "one.txt"),)),
            Step("A command that takes its time.", (("run", UNTIL_GO),)),
            Step("Another file.", (("write", "two.txt"),)),
            DONE,
        ),
        files={"one.txt": "one.txt of tool\n", "two.txt": "two.txt of tool\n"},
        meanwhile="switch in a tool call",
    ),
    "killed": Scenario(
        steps=(
            Step("First a file.", (("write", "one.txt"),)),
            Step(LONG, (("run", "echo two > two.txt"),), token_s=0.03, mark=True),
            DONE,
        ),
        files={"one.txt": "one.txt of killed\n", "two.txt": "two\n"},
        meanwhile="kill in an answer",
    ),
    "sub-agent": Scenario(
        steps=(
            Step("First a file.", (("write", "one.txt"),)),
            Step("Two tasks for others.", (("agent", "1"), ("agent", "2"))),
            Step("I wait for one.", (("collect", "1"),)),
            Step("And for the other.", (("collect", "2"),)),
            DONE,
        ),
        sub_steps=(Step("I look around.", (("run", "ls; echo sub >> sub.txt"),)), Step("I have looked around.")),
        files={"one.txt": "one.txt of sub-agent\n", "sub.txt": "sub\nsub\n"},
        lineages={"main": 1, "sub-agent": 2},
    ),
    "compaction": Scenario(
        steps=(
            Step("First a file.", (("write", "one.txt"),)),
            Step("Something to read.", (("run", "seq 1 1000"),)),
            Step("Another file.", (("write", "two.txt"),)),
            Step("More to read.", (("run", "seq 2001 3000"),)),
            Step("A third file.", (("write", "three.txt"),)),
            Step("One more file.", (("write", "four.txt"),)),
            DONE,
        ),
        files={f"{name}.txt": f"{name}.txt of compaction\n" for name in ("one", "two", "three", "four")},
        context_tokens={"claude-code": 42_600, "codex": 19_000, "opencode": 18_000, "qwen-code": 33_500},
        lineages={"main": 2, "main-summary": 1},
    ),
    "nested": Scenario(
        steps=(Step("A task for another.", (("agent", "1"),)), Step("I wait for it.", (("collect", "1"),)), DONE),
        sub_steps=(
            Step("I look around.", (("run", "echo sub >> sub.txt"),)),
            Step("A part of it is for another.", (("agent", "11"),)),
            Step("I wait for it.", (("run", "until grep nested sub.txt; do sleep 0.05; done"),)),
            Step("We have looked around."),
        ),
        nested_steps=(Step("I look too.", (("run", "echo nested >> sub.txt"),)), Step("I have looked.")),
        files={"sub.txt": "sub\nnested\n"},
        lineages={"main": 1, "sub-agent": 2},
    ),
    "sub-compaction": Scenario(
        steps=(Step("A task for another.", (("agent", "1"),)), Step("I wait for it.", (("collect", "1"),)), DONE),
        sub_steps=(
            Step("First a file.", (("write", "one.txt"),)),
            *(Step("Something to read.", (("run", f"seq {number}001 {number + 1}000"),)) for number in range(2, 7)),
            Step("Another file.", (("write", "two.txt"),)),
            Step("I have done it."),
        ),
        files={f"{name}.txt": f"{name}.txt of sub-compaction/1\n" for name in ("one", "two")},
        context_tokens={"claude-code": 42_600, "codex": 32_500, "opencode": 32_500, "qwen-code": 42_000},
        lineages={"main": 1, "sub-agent": 2, "sub-agent-summary": 1},
    ),
}
