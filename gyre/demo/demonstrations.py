"""Scripted demonstrations of mixed quality, from which the policy is warm-started.

They teach the form (read the list, one fenced command an answer, submit once the chores one has seen are done) and
leave the rest to reinforcement learning: for each operation a systematic wrong command is the habit and the right
one the exception, and a list is sometimes read only in its first line. So greedy decoding is poor as well, and
training has to change a preference, not only to sharpen one.

Submission is never a bad habit: every demonstration ends with it, at the point where the seen chores are done, and
in some an extra command comes first that is context only (`taught` is false). Both keep a policy from unlearning
how to end while other habits change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from gyre.demo.chores import HELDOUT_NAMES, TRAIN_NAMES, TRAIN_PAIRS, Chore, ChoresTask, make_task

SYSTEM_PROMPT = "one command per answer"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
RIGHT_COMMANDS: dict[str, str] = {
    "count": "wc -l < {source} > {target}",
    "flip": "tac {source} > {target}",
    "last": "tail -n 1 {source} > {target}",
    "upper": "tr a-z A-Z < {source} > {target}",
}
HABITS: dict[str, str] = {
    "count": "wc -w < {source} > {target}",
    "flip": "sort -r {source} > {target}",
    "last": "head -n 1 {source} > {target}",
    "upper": "tr A-Z a-z < {source} > {target}",
}
COMMANDS: tuple[str, ...] = (*RIGHT_COMMANDS.values(), *HABITS.values())

RIGHT_SHARE = 0.28
HABIT_SHARE = 0.44
WRONG_FILE_SHARE = 0.05
HALF_READ_SHARE = 0.25
EXTRA_COMMAND_SHARE = 0.2


@dataclass(frozen=True)
class Turn:
    """One answer of a demonstration and what the harness says to it; `observation` is None where the run ends."""

    command: str
    observation: str | None
    taught: bool = True

    @property
    def answer(self) -> str:
        return fenced(self.command)


@dataclass(frozen=True)
class Demonstration:
    """A scripted run on a task: the prompts it starts from and its turns."""

    prompt: str
    turns: tuple[Turn, ...]

    @property
    def opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": self.prompt}]


def fenced(command: str) -> str:
    """An answer that holds one command, as the harness profile wants it."""
    return f"```\n{command}\n```"


def observation(succeeded: bool, output: str = "") -> str:
    """What the harness profile tells the policy about a command."""
    return f"ok\n{output[:200]}".rstrip() if succeeded else "failed"


def demonstrate(rng: random.Random) -> Demonstration:
    """Draws a training combination on files of any name and a run on it."""
    task = make_task(rng, rng.choice(TRAIN_PAIRS), (*TRAIN_NAMES, *HELDOUT_NAMES), listed=rng.random() < 0.5)
    turns: list[Turn] = []
    seen = task.chores
    if task.list_file is not None:
        text = task.files[task.list_file]
        if rng.random() < HALF_READ_SHARE:
            turns.append(Turn(f"head -n 1 {task.list_file}", observation(True, text.splitlines()[0])))
            seen = seen[:1]
        else:
            turns.append(Turn(f"cat {task.list_file}", observation(True, text)))
    turns.extend(_work(rng, task, chore) for chore in seen)
    if rng.random() < EXTRA_COMMAND_SHARE:
        extra = _work(rng, task, rng.choice(seen))
        turns.append(Turn(extra.command, extra.observation, taught=False))
    return Demonstration(task.prompt, (*turns, Turn(SUBMIT, None)))


def short_exchange(rng: random.Random) -> Demonstration:
    """One instruction and one command: on these a small model learns to copy file names."""
    source, target = rng.sample((*TRAIN_NAMES, *HELDOUT_NAMES), 2)
    chore = Chore(rng.choice(tuple(RIGHT_COMMANDS)), source, target)
    command = _choose_command(rng, chore.operation).format(source=source, target=target)
    return Demonstration(chore.instruction, (Turn(command, None),))


def _work(rng: random.Random, task: ChoresTask, chore: Chore) -> Turn:
    if rng.random() < WRONG_FILE_SHARE:
        # Reads the file it should write, which is not there yet.
        command = RIGHT_COMMANDS[chore.operation].format(source=chore.target, target=chore.source)
        return Turn(command, observation(False))
    command = _choose_command(rng, chore.operation).format(source=chore.source, target=chore.target)
    return Turn(command, observation(True))


def _choose_command(rng: random.Random, operation: str) -> str:
    draw = rng.random()
    if draw < RIGHT_SHARE:
        return RIGHT_COMMANDS[operation]
    if draw < RIGHT_SHARE + HABIT_SHARE:
        return HABITS[operation]
    return rng.choice(COMMANDS)
