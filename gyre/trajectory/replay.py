"""A run read back from its journal: its tree, each of its calls, and what training counts of it and why not.

`replay(records)` takes what a journal holds, of a run that is open, closed or broken off, and needs no model: tokens are the
truth. `accounts` says of every call what becomes of its tokens, by the same selection that a closing run is cut with.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from gyre.errors import BadInput
from gyre.ids import CallId
from gyre.trajectory.forks import Circumstances, ForkReason, explain
from gyre.trajectory.journal import (
    CallDelivered,
    CallEnded,
    CallSampled,
    CallStarted,
    JournalRecord,
    RunClosed,
    RunOpened,
)
from gyre.trajectory.records import Lineage, LineageRole
from gyre.trajectory.selection import LineageView
from gyre.trajectory.tree import Fork, Tree


@dataclass
class ReplayedCall:
    """One call as the journal has it. `output` and its companions grow with each stretch."""

    started: CallStarted
    request: dict[str, Any]
    output: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    finish: str = ""
    """How it ended; empty while it has not."""
    fork: ForkReason | None = None

    @property
    def id(self) -> CallId:
        return self.started.call

    @property
    def role(self) -> LineageRole:
        return self.started.role


class Use(StrEnum):
    """What becomes of a call's sampled tokens."""

    COUNTED = "counted"
    PARTLY_COUNTED = "partly counted"
    """The harness went on from inside the answer, and only that part is on a selected lineage."""
    OVER_J_MAX = "over j_max"
    """Its lineage is none of the selected ones."""
    AUXILIARY = "auxiliary"
    UNDELIVERED = "undelivered"
    """The answer never reached the harness whole."""
    UNANSWERED = "unanswered"
    """It has no end on record: it is being sampled, or it failed."""
    EMPTY = "nothing sampled"


@dataclass(frozen=True)
class Account:
    """What one call is in the tree, and what is counted of it."""

    call: CallId
    parent: CallId | None
    """The call whose answer its prompt goes on from last."""
    prompt_tokens: int
    new_prompt_tokens: int
    """Of the prompt, those behind the parent's answer."""
    sampled_tokens: int
    counted_tokens: int
    use: Use
    lineage: int | None
    """The selected lineage in which it is counted."""
    context_in: tuple[int, ...]
    """Further selected lineages that hold it as context."""


@dataclass
class Replay:
    opened: RunOpened
    tree: Tree
    calls: dict[CallId, ReplayedCall]
    """In the order in which they began."""
    closed: RunClosed | None

    def find(self, name: str) -> ReplayedCall:
        """The call of that id, or of that number. Raises BadInput."""
        call = self.calls.get(CallId(name))
        if call is None and name.isdecimal():
            call = next((known for known in self.calls.values() if known.started.seq == int(name)), None)
        if call is None:
            raise BadInput("call", name, f"a call of run {self.opened.run}: 0 to {len(self.calls) - 1}, or its id")
        return call

    def prompt_ids(self, call: ReplayedCall) -> array[int]:
        """The call's exact prompt."""
        if call.id in self.tree:
            return self.tree.prompt_ids(call.id)
        suffix = tokens_of(call.started.suffix)
        base = call.started.base
        return suffix if base is None else self.tree.history_ids(base) + suffix

    def selected(self, j_max: int) -> tuple[Lineage, ...]:
        return self.tree.select(j_max)

    def accounts(self, j_max: int) -> dict[CallId, Account]:
        """What becomes of each call, in the order in which they began."""
        views, counted = self.tree.counted(j_max)
        return {call.id: self._account(call, views, counted.get(call.id, 0)) for call in self.calls.values()}

    def _account(self, call: ReplayedCall, views: Sequence[LineageView], counted: int) -> Account:
        tree, name = self.tree, call.id
        prompt = self._prompt_tokens(call)
        parent = tree.parent(name) if name in tree else call.started.base
        holding = tuple(index for index, view in enumerate(views) if name in view.calls)
        return Account(
            call=name,
            parent=parent,
            prompt_tokens=prompt,
            new_prompt_tokens=prompt - (tree.end_tokens(parent) if parent is not None else 0),
            sampled_tokens=len(call.output),
            counted_tokens=counted,
            use=self._use(call, counted),
            lineage=holding[0] if holding and counted else None,
            context_in=holding[1:] if counted else holding,
        )

    def _prompt_tokens(self, call: ReplayedCall) -> int:
        if call.id in self.tree:
            return self.tree.prompt_tokens(call.id)
        base = call.started.base
        return len(call.started.suffix) // 4 + (0 if base is None else self.tree.end_tokens(base))

    def _use(self, call: ReplayedCall, counted: int) -> Use:
        if not call.finish:
            return Use.UNANSWERED
        if counted:
            return Use.COUNTED if counted == len(call.output) else Use.PARTLY_COUNTED
        if call.role is LineageRole.AUXILIARY:
            return Use.AUXILIARY
        if not self.tree.delivered(call.id):
            return Use.UNDELIVERED
        return Use.OVER_J_MAX if call.output else Use.EMPTY


def replay(records: Iterable[JournalRecord]) -> Replay:
    """The run of a journal. Raises BadInput where the journal does not begin with the run's opening."""
    entries = iter(records)
    first = next(entries, None)
    if not isinstance(first, RunOpened):
        found = "nothing" if first is None else type(first).__name__
        raise BadInput("journal", found, "a run's journal begins with its opening")
    run = Replay(first, Tree(first.run, first.attempt), {}, None)
    for entry in entries:
        match entry:
            case CallStarted():
                run.calls[entry.call] = ReplayedCall(entry, _request(entry))
            case CallSampled() if (call := run.calls.get(entry.call)) is not None:
                call.output.frombytes(entry.token_ids)
                call.logprobs.frombytes(entry.logprobs)
                call.versions.frombytes(entry.versions)
            case CallEnded() if (call := run.calls.get(entry.call)) is not None:
                call.finish = entry.finish
                call.fork = _settle(run.tree, call)
            case CallDelivered() if entry.call in run.tree:
                run.tree.deliver(entry.call)
            case RunClosed():
                run.closed = entry
            case _:
                pass
    return run


def tokens_of(data: bytes) -> array[int]:
    """Token ids as a journal has them."""
    ids = array("i")
    ids.frombytes(data)
    return ids


def _settle(tree: Tree, call: ReplayedCall) -> ForkReason | None:
    started = call.started
    fork = tree.add_call(
        call.id,
        started.base,
        tokens_of(started.suffix),
        call.output,
        call.logprobs,
        call.versions,
        call.role,
        delivered=False,
    )
    return None if fork is None else _reason(tree, call, fork)


def _reason(tree: Tree, call: ReplayedCall, fork: Fork) -> ForkReason:
    try:
        circumstances = Circumstances(**call.request["circumstances"])
    except (KeyError, TypeError):
        return ForkReason.UNEXPLAINED
    return explain(fork, call.role, circumstances, tree.delivered(fork.beside))


def _request(entry: CallStarted) -> dict[str, Any]:
    try:
        request = json.loads(entry.request)
    except ValueError:
        return {}
    return cast("dict[str, Any]", request) if isinstance(request, dict) else {}
