"""The task family `chores`: two small text chores in a workspace of a few files.

A task asks for two chores, each of which reads one file and writes another. Half of the tasks say so in the prompt; the
other half name a list file that has to be read first. Everything is a pure function of `(seed, index)`, so a job's
tasks can be made again anywhere.

Held-out tasks differ from training tasks in two ways, and both are properties of the split, not of the seed:

- names: the files of a held-out task carry names from `HELDOUT_NAMES`, which no training task uses;
- combinations: a combination is the ordered pair of operations that a task asks for. `HELDOUT_PAIRS` never occur in
  training. Each operation stands once in each place of them, so a policy that learned the operations can do them all.

The policy's warm start keeps out of the held-out combinations too. It does see every name, since a small model cannot
copy a word that it never met; reinforcement learning sees the training names alone.

The seed draws fresh tasks within both sides: `heldout()` of a seed that nobody used holds tasks that nobody saw.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from gyre.harness.tasks import Task
from gyre.ids import TaskId

_NAMES = """
plum fig kiwi lime pear date corn bean leek kale mint sage dill rice oats rye barley hazel maple cedar birch aspen
willow oak elm pine fern moss reed clay sand silt rock iron zinc gold lead tin copper cobalt otter badger heron
raven finch robin wren crane swan goose duck hare fox wolf bear lynx moose bison camel llama tiger panda koala seal
"""
_CONTENT = "red blue green white black pink brown gray amber coral ivory olive teal navy beige lilac"
TRAIN_NAMES: tuple[str, ...] = tuple(_NAMES.split()[:48])
HELDOUT_NAMES: tuple[str, ...] = tuple(_NAMES.split()[48:])
CONTENT_WORDS: tuple[str, ...] = tuple(_CONTENT.split())


@dataclass(frozen=True)
class Operation:
    """One kind of chore: how a task asks for it, and what it writes given the lines that it read."""

    instruction: str
    result: Callable[[list[str]], list[str]]


OPERATIONS: Mapping[str, Operation] = {
    "count": Operation("write the line count of {source} to {target}", lambda lines: [str(len(lines))]),
    "flip": Operation("write the lines of {source} in reverse to {target}", lambda lines: lines[::-1]),
    "last": Operation("write the last line of {source} to {target}", lambda lines: lines[-1:]),
    "upper": Operation("write {source} in capitals to {target}", lambda lines: [line.upper() for line in lines]),
}
HELDOUT_PAIRS: tuple[tuple[str, str], ...] = (
    ("count", "flip"),
    ("flip", "last"),
    ("last", "upper"),
    ("upper", "count"),
)
TRAIN_PAIRS: tuple[tuple[str, str], ...] = tuple(p for p in permutations(OPERATIONS, 2) if p not in HELDOUT_PAIRS)


@dataclass(frozen=True)
class Chore:
    """One chore of a task: `operation` on the file `source`, written to the file `target`."""

    operation: str
    source: str
    target: str

    @property
    def instruction(self) -> str:
        return OPERATIONS[self.operation].instruction.format(source=self.source, target=self.target)


@dataclass(frozen=True)
class ChoresTask:
    """A task of the family: what the prompt says, the files that lie in the workspace, and the chores behind it.

    `list_file` names the file that holds the chores where the prompt does not; None where the prompt does.
    """

    prompt: str
    files: Mapping[str, str]
    chores: tuple[Chore, ...]
    list_file: str | None

    @property
    def expected(self) -> dict[str, str]:
        """The file that each chore has to leave, with its content."""
        return {c.target: _text(OPERATIONS[c.operation].result(self.files[c.source].splitlines())) for c in self.chores}


def make_task(rng: random.Random, pair: tuple[str, str], names: tuple[str, ...], listed: bool) -> ChoresTask:
    """Draws a task that asks for `pair`, with file names out of `names`."""
    first_source, second_source, first_target, second_target, list_name = rng.sample(names, 5)
    chores = (Chore(pair[0], first_source, first_target), Chore(pair[1], second_source, second_target))
    files = {chore.source: _text(_draw_lines(rng)) for chore in chores}
    instructions = [chore.instruction for chore in chores]
    if not listed:
        return ChoresTask("\n".join(instructions), files, chores, None)
    files[list_name] = _text(instructions)
    return ChoresTask(f"do the chores in {list_name}", files, chores, list_name)


def train_task(seed: int, index: int) -> ChoresTask:
    """Task `index` of the training stream of `seed`.

    Eight tasks in a row ask for the eight training pairs, in an order drawn anew for every eight, and half of them are
    listed: a step of eight groups sees every operation equally often, which takes some noise out of its gradient.
    """
    block, place = divmod(index, len(TRAIN_PAIRS))
    order = random.Random(f"chores/{seed}/order/{block}")
    pairs = order.sample(TRAIN_PAIRS, len(TRAIN_PAIRS))
    listed = order.sample([i % 2 == 0 for i in range(len(pairs))], len(pairs))
    return make_task(random.Random(f"chores/{seed}/train/{index}"), pairs[place], TRAIN_NAMES, listed[place])


def heldout_task(seed: int, index: int) -> ChoresTask:
    """Held-out task `index` of `seed`; eight in a row ask for every held-out pair once directly and once by a list."""
    pair = HELDOUT_PAIRS[index % len(HELDOUT_PAIRS)]
    listed = index // len(HELDOUT_PAIRS) % 2 == 1
    return make_task(random.Random(f"chores/{seed}/heldout/{index}"), pair, HELDOUT_NAMES, listed)


class ChoresSource:
    """The family as a task source: an endless training stream and `heldout` held-out tasks, both drawn by `seed`."""

    name = "chores"
    private_folders: tuple[Path, ...] = ()

    def __init__(self, seed: int, heldout: int) -> None:
        self._seed = seed
        self._heldout = heldout

    def train(self, index: int) -> Task:
        return _packed(f"chores-{self._seed}-train-{index}", train_task(self._seed, index))

    def heldout(self) -> list[Task]:
        return [
            _packed(f"chores-{self._seed}-heldout-{index}", heldout_task(self._seed, index))
            for index in range(self._heldout)
        ]


def _packed(task_id: str, task: ChoresTask) -> Task:
    evaluator = Path(__file__).with_name("evaluate_chores.py")
    return Task(
        id=TaskId(task_id),
        instruction=task.prompt,
        files={name: text.encode() for name, text in task.files.items()},
        # Isolated and without site packages: the evaluator starts in tens of milliseconds.
        evaluator=(sys.executable, "-I", "-S", str(evaluator), "{task}", "{workspace}", "{run}"),
        data=json.dumps({"expected": task.expected}).encode(),
    )


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _draw_lines(rng: random.Random) -> list[str]:
    """Lines on which no wrong command leaves the same file as the right one."""
    while True:
        lines = [" ".join(rng.sample(CONTENT_WORDS, rng.choice((1, 1, 2)))) for _ in range(rng.randint(4, 6))]
        lines.append(rng.choice(lines))
        rng.shuffle(lines)
        ordered = sorted(lines)
        outcomes = (lines, lines[::-1], ordered, ordered[::-1], lines[:1], lines[-1:], lines[:2], sorted(set(lines)))
        if any(" " in line for line in lines) and len({tuple(outcome) for outcome in outcomes}) == len(outcomes):
            return lines
