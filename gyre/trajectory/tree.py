"""The trajectory tree: every call of one run as a radix tree over token ids.

The gateway adds each call with what was new in it; the tree finds where it belongs, shares what is shared, and gives
back exact prompts and outputs, lineages and, at the end, the selected ones. It promises:

- adding a call costs its new tokens, not the history's (with a `base`; without one the whole prompt is walked);
- a sampled token is in exactly one node: it is never merged with an equal sample, and stays in its context;
- on a lineage each prompt begins with the whole prompt and output of the call before it (`check` proves it).
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from gyre.errors import BadInput
from gyre.ids import CallId, RunId
from gyre.trajectory.radix import ROOT, Match, Radix
from gyre.trajectory.records import Lineage, LineageRole
from gyre.trajectory.selection import LineageView, choose


class ForkCause(StrEnum):
    """Why a call's prompt is not the growth of one lineage."""

    NEW_PREFIX = "new-prefix"
    """It shares nothing with the calls before it: another thread, or what follows a compaction."""
    REWRITTEN_PROMPT = "rewritten-prompt"
    """It leaves an earlier call inside tokens that the harness wrote."""
    REWRITTEN_OUTPUT = "rewritten-output"
    """It leaves an earlier call inside, or instead of, tokens that the policy sampled."""
    SECOND_CONTINUATION = "second-continuation"
    """It follows an answer that already had another continuation."""
    SHORTENED = "shortened"
    """It ends where an earlier prompt went on."""
    RESAMPLED = "resampled"
    """It is the prompt of an earlier call, asked again."""


@dataclass(frozen=True)
class Fork:
    """A place where a call begins a branch."""

    call: CallId
    cause: ForkCause
    shared_tokens: int
    """Tokens of its prompt that were in the tree already."""
    beside: CallId
    """A call on the other side."""


@dataclass(slots=True)
class _Call:
    id: CallId
    order: int
    role: LineageRole
    delivered: bool
    base: int
    """Order of the call that it extends; -1 when it came with its whole prompt."""
    prompt_node: int
    end_node: int
    output_tokens: int
    prompt_crc: int
    """Of all tokens of the prompt, as it was given; `check` compares."""
    end_crc: int

    @property
    def counts(self) -> bool:
        """Whether training may count what was sampled for it."""
        return self.delivered and self.role is not LineageRole.AUXILIARY


class Tree:
    """The calls of one attempt of one run."""

    def __init__(self, run: RunId, attempt: int) -> None:
        self.run = run
        self.attempt = attempt
        self.forks: Counter[ForkCause] = Counter()
        self._calls: list[_Call] = []
        self._by_id: dict[CallId, _Call] = {}
        self._radix = Radix()
        self._delivered_calls = 0
        self._delivered_tokens = 0

    # ------------------------------------------------------------------------------------------------ adding

    def add_call(
        self,
        call: CallId,
        base: CallId | None,
        suffix: Sequence[int],
        output: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        role: LineageRole,
        delivered: bool,
    ) -> Fork | None:
        """Add a call whose prompt is `base`'s prompt + `base`'s output + `suffix`; returns the fork it made, if any.

        Without `base` the suffix is the whole prompt, and the longest prefix that is in the tree is shared. `logprobs`
        and `versions` have one entry an output token. A base's answer came back, so it was delivered, whatever was
        thought before. Raises BadInput, and then leaves the tree as it was.
        """
        if call in self._by_id:
            raise BadInput("call", call, "the call is in the tree already")
        extended = None if base is None else self._call(base, "base")
        prompt, sampled = _token_array("suffix", suffix), _token_array("output", output)
        chances, sources = array("f", logprobs), array("i", versions)
        if not len(sampled) == len(chances) == len(sources):
            lengths = f"{len(sampled)} tokens, {len(chances)} log-probs, {len(sources)} versions"
            raise BadInput("output", lengths, "one log-prob and one version a token")
        if sources and min(sources) < 0:
            raise BadInput("versions", min(sources), "the version of a sampled token is at least 0")
        if not all(map(isfinite, chances)):
            raise BadInput("logprobs", next(x for x in chances if not isfinite(x)), "log-probs are finite")

        order = len(self._calls)
        match = self._radix.match(extended.end_node if extended else ROOT, prompt, self._rank)
        rest = prompt[match.tokens :]
        fork = self._fork(call, match, rest)
        node = match.node if match.inner < 0 else self._radix.split(match.inner, match.kept)
        prompt_node = self._radix.add_prompt(node, rest, order) if rest else node
        end_node = self._radix.add_output(prompt_node, sampled, chances, sources, order) if sampled else prompt_node
        prompt_crc = zlib.crc32(prompt, extended.end_crc if extended else 0)
        added = _Call(
            id=call,
            order=order,
            role=role,
            delivered=False,
            base=extended.order if extended else -1,
            prompt_node=prompt_node,
            end_node=end_node,
            output_tokens=len(sampled),
            prompt_crc=prompt_crc,
            end_crc=zlib.crc32(sampled, prompt_crc),
        )
        self._calls.append(added)
        self._by_id[call] = added
        if extended:
            self._deliver(extended)
        if delivered:
            self._deliver(added)
        if fork:
            self.forks[fork.cause] += 1
        return fork

    def deliver(self, call: CallId) -> None:
        """The call's answer reached the harness whole."""
        self._deliver(self._call(call))

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def calls(self) -> tuple[CallId, ...]:
        """All calls, in the order they were added."""
        return tuple(self._by_id)

    @property
    def tokens(self) -> int:
        """Tokens in the tree; a shared one is there once."""
        return len(self._radix.ids)

    @property
    def last(self) -> CallId | None:
        """The call that was added last."""
        return self._calls[-1].id if self._calls else None

    @property
    def delivered_calls(self) -> int:
        """Calls whose answer reached the harness."""
        return self._delivered_calls

    @property
    def sampled_tokens(self) -> int:
        """Tokens the policy sampled in answers that reached the harness."""
        return self._delivered_tokens

    def __contains__(self, call: CallId) -> bool:
        return call in self._by_id

    def delivered(self, call: CallId) -> bool:
        return self._call(call).delivered

    def role(self, call: CallId) -> LineageRole:
        return self._call(call).role

    def prompt_tokens(self, call: CallId) -> int:
        return self._radix.depth[self._call(call).prompt_node]

    def output_tokens(self, call: CallId) -> int:
        return self._call(call).output_tokens

    def end_tokens(self, call: CallId) -> int:
        """Tokens of the call's prompt and output."""
        return self._radix.depth[self._call(call).end_node]

    def parent(self, call: CallId) -> CallId | None:
        """The call whose sampled tokens are the last ones in this call's prompt; None where it has none."""
        node = self._call(call).prompt_node
        while node != ROOT and not self._radix.sampled[node]:
            node = self._radix.parent[node]
        return None if node == ROOT else self._calls[self._radix.maker[node]].id

    def prompt_ids(self, call: CallId) -> array[int]:
        """The call's exact prompt."""
        return self._radix.ids_along(self._radix.path(self._call(call).prompt_node))

    def prompt_tail(self, call: CallId, tokens: int) -> array[int]:
        """The last `tokens` of the call's prompt, at the cost of those."""
        return self._radix.tail(self._call(call).prompt_node, tokens)

    def history_ids(self, call: CallId) -> array[int]:
        """The call's prompt and output: what a prompt that extends it begins with."""
        return self._radix.ids_along(self._radix.path(self._call(call).end_node))

    def output_ids(self, call: CallId) -> array[int]:
        """The call's exact output."""
        return self._radix.ids_along(self._output_path(self._call(call)))

    def output_logprobs(self, call: CallId) -> array[float]:
        return self._radix.logprobs_along(self._output_path(self._call(call)))

    def output_versions(self, call: CallId) -> array[int]:
        return self._radix.versions_along(self._output_path(self._call(call)))

    def lineages(self) -> list[LineageView]:
        """The lineages that end in a delivered answer, oldest leaf first.

        Calls that never reached the harness and, but for auxiliary lineages, auxiliary calls are looked through: a
        title asked for at the end of a thread does not hide the thread.
        """
        inside_any = self._inside(call for call in self._calls if call.delivered)
        inside_counted = self._inside(call for call in self._calls if call.counts)
        return [
            self._view(call)
            for call in self._calls
            if call.delivered
            and call.output_tokens
            and call.end_node not in (inside_counted if call.counts else inside_any)
        ]

    def select(self, j_max: int) -> tuple[Lineage, ...]:
        """The lineages to train, whole. A sampled token is counted once, in the first of them that holds it."""
        seen: set[int] = set()
        return tuple(self._lineage(index, view, seen) for index, view in enumerate(choose(self.lineages(), j_max)))

    def counted(self, j_max: int) -> tuple[tuple[LineageView, ...], dict[CallId, int]]:
        """The selected lineages without their tokens, and how many of each call's sampled tokens they count."""
        views = choose(self.lineages(), j_max)
        seen: set[int] = set()
        counts: Counter[CallId] = Counter()
        for view in views:
            path = self._radix.path(self._call(view.leaf).end_node)
            for node in path:
                if node not in seen and self._countable(node):
                    counts[self._calls[self._radix.maker[node]].id] += self._radix.length[node]
            seen.update(path)
        return views, dict(counts)

    def check(self) -> tuple[str, ...]:
        """What is wrong with the tree, one line a fault; empty when it is sound. Costs one walk over the tokens."""
        return (*self._radix.faults(), *self._call_faults())

    # ------------------------------------------------------------------------------------------------ inside

    def _deliver(self, call: _Call) -> None:
        if not call.delivered:
            call.delivered = True
            self._delivered_calls += 1
            self._delivered_tokens += call.output_tokens

    def _call(self, call: CallId, field: str = "call") -> _Call:
        found = self._by_id.get(call)
        if found is None:
            raise BadInput(field, call, "it must be a call of this run's tree")
        return found

    def _rank(self, node: int) -> int:
        """Which of several equal nodes a prompt means: the newest answer that reached the harness, a prompt last."""
        if not self._radix.sampled[node]:
            return -1
        maker = self._radix.maker[node]
        return maker + (len(self._calls) if self._calls[maker].delivered else 0)

    def _fork(self, call: CallId, match: Match, rest: array[int]) -> Fork | None:
        """The fork that a prompt makes which matches as `match` says and then goes on with `rest`."""
        radix = self._radix
        others = [match.inner] if match.inner >= 0 else radix.children(match.node)
        if not others:
            return None
        beside = next((other for other in others if radix.sampled[other]), others[0])
        leaves_an_answer = radix.sampled[beside] == 1
        if match.inner < 0 and not rest and leaves_an_answer:
            cause = ForkCause.RESAMPLED
        elif leaves_an_answer:
            cause = ForkCause.REWRITTEN_OUTPUT
        elif not rest:
            cause = ForkCause.SHORTENED
        elif match.tokens == 0 and match.node == ROOT:
            cause = ForkCause.NEW_PREFIX
        elif match.inner < 0 and radix.sampled[match.node]:
            cause = ForkCause.SECOND_CONTINUATION
        else:
            cause = ForkCause.REWRITTEN_PROMPT
        return Fork(
            call=call,
            cause=cause,
            shared_tokens=radix.depth[match.node] + match.kept,
            beside=self._calls[radix.maker[beside]].id,
        )

    def _output_path(self, call: _Call) -> list[int]:
        """The nodes of the call's output: several, once other calls branched off inside it."""
        return self._radix.path(call.end_node, above=call.prompt_node)

    def _inside(self, calls: Iterable[_Call]) -> set[int]:
        """The nodes above the outputs of `calls`: a lineage that ended at one of them would not be whole."""
        inside: set[int] = set()
        for call in calls:
            node = call.prompt_node if call.output_tokens else ROOT
            while node != ROOT and node not in inside:
                inside.add(node)
                node = self._radix.parent[node]
        return inside

    def _countable(self, node: int) -> bool:
        return self._radix.sampled[node] == 1 and self._calls[self._radix.maker[node]].counts

    def _view(self, leaf: _Call) -> LineageView:
        path = self._radix.path(leaf.end_node)
        makers = {self._radix.maker[node]: None for node in path if self._radix.sampled[node]}
        whole = set(path)
        return LineageView(
            leaf=leaf.id,
            order=leaf.order,
            role=leaf.role,
            calls=tuple(
                call.id for call in map(self._calls.__getitem__, makers) if call.delivered and call.end_node in whole
            ),
            tokens=self._radix.depth[leaf.end_node],
            sampled_tokens=sum(self._radix.length[node] for node in path if self._countable(node)),
        )

    def _lineage(self, index: int, view: LineageView, seen: set[int]) -> Lineage:
        radix = self._radix
        path = radix.path(self._call(view.leaf).end_node)
        counted = bytearray()
        for node in path:
            counts = self._countable(node) and node not in seen
            counted.extend((b"\1" if counts else b"\0") * radix.length[node])
        seen.update(path)
        return Lineage(
            run=self.run,
            attempt=self.attempt,
            index=index,
            role=view.role,
            token_ids=radix.ids_along(path).tobytes(),
            counted=bytes(counted),
            logprobs=radix.logprobs_along(path).tobytes(),
            versions=radix.versions_along(path).tobytes(),
        )

    def _call_faults(self) -> Iterator[str]:
        radix = self._radix
        crcs, spans = radix.survey()

        def begins_with(node: int, above: int) -> bool:
            return spans[above][0] <= spans[node][0] and spans[node][1] <= spans[above][1]

        for call in self._calls:
            if crcs[call.prompt_node] != call.prompt_crc:
                yield f"call {call.id}: the path to its answer is not the prompt it was given"
            if crcs[call.end_node] != call.end_crc:
                yield f"call {call.id}: its path does not end with the tokens that were sampled for it"
            if not begins_with(call.end_node, call.prompt_node):
                yield f"call {call.id}: its answer does not follow its prompt"
            elif any(
                not radix.sampled[node] or radix.maker[node] != call.order for node in self._output_path(call)
            ) or (radix.depth[call.end_node] - radix.depth[call.prompt_node] != call.output_tokens):
                yield f"call {call.id}: its answer is not in nodes of its own"
            if call.base >= 0 and not begins_with(call.prompt_node, self._calls[call.base].end_node):
                yield f"call {call.id}: its prompt does not begin with the prompt and output of its base"


def _token_array(field: str, tokens: Sequence[int]) -> array[int]:
    try:
        ids = array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise BadInput(field, str(tokens)[:60], "token ids are whole numbers below 2**31") from error
    if len(ids) and min(ids) < 0:
        raise BadInput(field, min(ids), "a token id is at least 0")
    return ids
