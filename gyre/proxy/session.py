"""One run at the gateway: its tree, its calls, and what a request means beside them.

Nothing here waits, samples or writes. The gateway asks `find` whether a request is a retry, `begin` what to sample for
it, tells `end` what was sampled and `deliver` that the harness has it, and journals the records that each returns.
`restore` makes the same session again from the journal.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from gyre.actors.messages import OpenRun
from gyre.harness.wire import GENERIC, Wire
from gyre.ids import CallId
from gyre.proxy.calls import Call, call_of, started
from gyre.proxy.conversation import Answer, Conversation, Finish, Reply, ToolCall, ToolForm, digest
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.faults import bad_request, too_long
from gyre.proxy.json_text import exact, load
from gyre.proxy.prompts import Prompt, Prompts
from gyre.proxy.recognition import Threads, Walk
from gyre.proxy.rendering import Rendering
from gyre.proxy.roles import Course, Part, Roles
from gyre.proxy.sampling import Cached, Ending, Stretch
from gyre.proxy.stops import before_stop
from gyre.proxy.volatile import SystemPrompts
from gyre.trajectory.forks import ForkReason, explain
from gyre.trajectory.journal import (
    CallDelivered,
    CallEnded,
    CallSampled,
    CallStarted,
    JournalRecord,
    RunOpened,
)
from gyre.trajectory.records import LineageRole, RunTrace
from gyre.trajectory.selection import describe
from gyre.trajectory.tree import Fork, Tree

_AROUND_FORK_TOKENS = 48
"""As much of each side of an unexplained fork as is told."""
_NO_FORMS: Mapping[str, ToolForm] = MappingProxyType({})
_log = logging.getLogger(__name__)


class Session:
    """One attempt of one run, open."""

    def __init__(
        self, opened: OpenRun, rendering: Rendering, dialects: Mapping[str, Dialect], wire: Wire = GENERIC
    ) -> None:
        self.opened = opened
        self.wire = wire
        self.tree = Tree(opened.run, opened.attempt)
        self.failure = ""
        """Why the run was stopped, or empty."""
        self.continued_calls = 0
        self.interrupted_calls = 0
        self.recomputed_tokens = 0
        self.max_silence_s = 0.0
        self.forks: Counter[ForkReason] = Counter()
        self._rendering = rendering
        self._dialects = dialects
        self._calls: dict[CallId, Call] = {}
        self._by_digest: dict[bytes, Call] = {}
        self._seq = 0
        self._undelivered: set[CallId] = set()
        """Answered calls of which it is not known that the harness has the answer."""
        self._ends: dict[Part, Call] = {}
        self._systems = SystemPrompts(wire)
        self._threads = Threads(self._systems)
        self._roles = Roles(wire, self._systems)
        self._course = Course()
        self._prompts = Prompts(rendering, self.tree, self._systems)

    # ------------------------------------------------------------------------------------------ a call's life

    def find(self, body_digest: bytes, headers: Mapping[str, str]) -> Call | None:
        """The call that a request with this digest repeats: two sub-agents may ask the same, and mean two answers."""
        return self._by_digest.get(self._identity(body_digest, headers))

    def serves(self, call: Call, conversation: Conversation, context_tokens: int) -> bool:
        """Whether the call's answer is one to an equal request too: it is not longer than that allows, and not one that
        the harness has had and asks for again because it was empty, or was cut where more is allowed now."""
        answer = call.answer
        if answer is None:
            return True
        if conversation.max_tokens is not None and answer.output_tokens > conversation.max_tokens:
            return False
        if not self.tree.delivered(call.id):
            return True
        if answer.finish is Finish.LENGTH:
            return self._limit(conversation, context_tokens - answer.prompt_tokens) <= call.max_tokens
        return bool(answer.text or answer.tool_calls)

    def begin(
        self,
        conversation: Conversation,
        body: Mapping[str, Any],
        body_digest: bytes,
        dialect: Dialect,
        headers: Mapping[str, str],
        context_tokens: int,
        now_unix_s: float,
    ) -> tuple[Call, list[JournalRecord]]:
        """A new call. Raises Fault(TOO_LONG) or Fault(BAD_REQUEST), and has then changed nothing."""
        walk = self._walk(conversation, headers)
        prompt = self._prompt(conversation, walk)
        room = context_tokens - prompt.tokens
        if room < 1:
            raise too_long(prompt.tokens, context_tokens)
        last = next((turn for turn in reversed(walk.turns) if turn is not None), None)
        part = self._roles.of(conversation, headers, None if last is None else self._calls[last].part)
        call = Call(
            id=CallId(f"{self.opened.run}.{self.opened.attempt}.{self._seq}"),
            seq=self._seq,
            digest=self._identity(body_digest, headers),
            dialect=dialect.name,
            started_unix_s=now_unix_s,
            chain=walk.chain,
            part=part,
            circumstances=self._course.next(part, walk),
            base=prompt.base,
            suffix=prompt.suffix,
            max_tokens=self._limit(conversation, room),
            stop=conversation.stop,
            seed=conversation.seed,
        )
        self._seq += 1
        self._enter(call)
        # Answers that the harness sends back have reached it, whatever was thought before.
        back = self._undelivered.intersection(walk.turns) if self._undelivered else ()
        returned = [self.deliver(turn) for turn in back]
        return call, [*(record for record in returned if record is not None), started(call, body)]

    def count_tokens(self, conversation: Conversation) -> int:
        """Tokens of the prompt that the conversation would have now."""
        return self._prompt(conversation, self._walk(conversation, {})).tokens

    def prompt_of(self, call: Call) -> array[int]:
        if call.id in self.tree:
            return self.tree.prompt_ids(call.id)
        if call.base is None:
            return call.suffix
        return self.tree.history_ids(call.base) + call.suffix

    def known_before(self, call: Call) -> Cached | None:
        """Where the history that the call builds upon was computed."""
        return None if call.base is None else self._calls[call.base].cached

    def sampled(self, call: Call, stretch: Stretch) -> JournalRecord:
        """The tokens of one more stretch."""
        call.output += stretch.token_ids
        call.logprobs += stretch.logprobs
        call.versions += stretch.versions
        return CallSampled(
            call=call.id,
            token_ids=stretch.token_ids.tobytes(),
            logprobs=stretch.logprobs.tobytes(),
            versions=stretch.versions.tobytes(),
        )

    def end(self, call: Call, ending: Ending) -> JournalRecord:
        """The call has all its tokens: they enter the tree, and its answer can be recognised."""
        plain = {
            "finish": ending.finish.value,
            "stop_sequence": ending.stop_sequence,
            "cached_tokens": ending.cached_tokens,
            "continued": ending.continued,
            "recomputed_tokens": ending.recomputed_tokens,
            "silence_s": round(ending.max_silence_s, 6),
        }
        call.cached = ending.cached
        minted, fork = self._settle(call, plain)
        if fork is not None and self._reason(call, fork) is ForkReason.UNEXPLAINED:
            _log.warning("run %s: an unexplained fork\n%s", self.opened.run, self._sides(fork))
        return CallEnded(call=call.id, finish=ending.finish.value, minted=minted, answer=exact(plain))

    def fail(self, call: Call, *, seen: bool) -> None:
        """The call has no answer, by a fault of ours; `seen` where a harness is told so. A retry is a new call."""
        self.interrupted_calls += seen
        if self._by_digest.get(call.digest) is call:
            del self._by_digest[call.digest]

    def deliver(self, call: CallId) -> JournalRecord | None:
        """The harness has the call's answer; None where that was known."""
        if self.tree.delivered(call):
            return None
        self.tree.deliver(call)
        self._undelivered.discard(call)
        return CallDelivered(call=call)

    def reply(
        self, call: Call, model: str, forms: Mapping[str, ToolForm] = _NO_FORMS, max_tokens: int | None = None
    ) -> Reply:
        """The answer of an ended call under its names, which are the same each time; the rest is its request's."""
        assert call.answer is not None
        name = self._dialects[call.dialect].message_id(self._stem(call))
        return Reply(name, model, int(call.started_unix_s), call.answer, forms, max_tokens)

    # ------------------------------------------------------------------------------------------ the run

    @property
    def answered_calls(self) -> int:
        return self.tree.delivered_calls

    def ends(self) -> list[Call]:
        """The call that each thread ended with so far, the newest first: what the run's next requests build upon."""
        return list(reversed(self._ends.values()))

    def trace(self, j_max: int) -> tuple[RunTrace, tuple[Any, ...]]:
        """The run's figures and its selected lineages. The tree is checked: what is wrong with it is among the figures."""
        faults = self.tree.check()
        for fault in faults:
            _log.error("run %s: its tree is not sound: %s", self.opened.run, fault)
        lineages = self.tree.select(j_max)
        infos = tuple(describe(lineage) for lineage in lineages)
        trace = RunTrace(
            run=self.opened.run,
            attempt=self.opened.attempt,
            calls=self.answered_calls,
            sampled_tokens=self.tree.sampled_tokens,
            counted_tokens=sum(info.counted_tokens for info in infos),
            tree_tokens=self.tree.tokens,
            lineages=infos,
            continued_calls=self.continued_calls,
            interrupted_calls=self.interrupted_calls,
            prefix_tokens_recomputed=self.recomputed_tokens,
            max_silence_s=self.max_silence_s,
            failure=self.failure,
            forks={reason.value: count for reason, count in self.forks.items()},
            faults=faults,
        )
        return trace, lineages

    def restore(self, records: Iterable[JournalRecord]) -> None:
        """Take the calls of a journal in. A call that had not ended is as it was when its last stretch ended."""
        for entry in records:
            match entry:
                case CallStarted():
                    self._restore_call(entry)
                case CallSampled() if (call := self._calls.get(entry.call)) is not None:
                    call.output.frombytes(entry.token_ids)
                    call.logprobs.frombytes(entry.logprobs)
                    call.versions.frombytes(entry.versions)
                case CallEnded() if (call := self._calls.get(entry.call)) is not None:
                    self._settle(call, load(entry.answer))
                case CallDelivered() if entry.call in self.tree:
                    self.deliver(entry.call)
                case _:
                    pass

    def unfinished(self) -> list[Call]:
        return [call for call in self._calls.values() if call.answer is None]

    # ------------------------------------------------------------------------------------------ private

    def _prompt(self, conversation: Conversation, walk: Walk) -> Prompt:
        try:
            return self._prompts.of(conversation, walk)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            # Whichever turn it is in: text that no tokenizer takes, say, or arguments too deep to be read.
            raise bad_request(f"messages: they cannot be rendered for this model ({error})") from error

    def _walk(self, conversation: Conversation, headers: Mapping[str, str]) -> Walk:
        name = self._roles.thread_name(headers)
        return self._threads.walk(conversation.messages, conversation.tools, name)

    def _identity(self, body_digest: bytes, headers: Mapping[str, str]) -> bytes:
        return digest(body_digest, self._roles.thread_name(headers))

    def _limit(self, conversation: Conversation, room: int) -> int:
        """Tokens that the request's answer may have, where the context has room for `room`."""
        return min(room, self.opened.max_tokens, conversation.max_tokens or self.opened.max_tokens)

    def _enter(self, call: Call) -> None:
        self._calls[call.id] = call
        self._by_digest[call.digest] = call

    def _settle(self, call: Call, end: Mapping[str, Any]) -> tuple[tuple[str, ...], Fork | None]:
        """Take an ended call in, from its own end or the journal's; returns the ids minted for it, and its fork."""
        # A suffix ends with the generation prompt: all of the prompt that parsing looks at.
        parsed = self._rendering.parse(call.output, call.suffix)
        dialect, stem = self._dialects[call.dialect], self._stem(call)
        calls = tuple(
            ToolCall(dialect.mint(stem, place), name, arguments)
            for place, (name, arguments) in enumerate(parsed.tool_calls)
        )
        role = call.part.role
        fork = self.tree.add_call(
            call.id, call.base, call.suffix, call.output, call.logprobs, call.versions, role, delivered=False
        )
        self._undelivered.add(call.id)
        if role in (LineageRole.MAIN, LineageRole.SUB_AGENT):
            self._ends.pop(call.part, None)
            self._ends[call.part] = call
        if call.base is not None:
            self._undelivered.discard(call.base)
        if fork is not None:
            self.forks[self._reason(call, fork)] += 1
        call.answer = Answer(
            text=before_stop(parsed.text, end["stop_sequence"]),
            reasoning=parsed.reasoning,
            tool_calls=calls,
            finish=Finish(end["finish"]),
            stop_sequence=end["stop_sequence"],
            prompt_tokens=self.tree.prompt_tokens(call.id),
            output_tokens=len(call.output),
            reasoning_tokens=parsed.reasoning_tokens,
            cached_tokens=end["cached_tokens"],
        )
        minted = (dialect.message_id(stem), *(tool_call.id for tool_call in calls))
        self._threads.add(call.id, call.chain, call.part.thread.name, call.answer, minted)
        self.continued_calls += end["continued"]
        self.recomputed_tokens += end["recomputed_tokens"]
        self.max_silence_s = max(self.max_silence_s, end["silence_s"])
        call.suffix, call.output, call.logprobs, call.versions = array("i"), array("i"), array("f"), array("i")
        return minted, fork

    def _reason(self, call: Call, fork: Fork) -> ForkReason:
        return explain(fork, call.part.role, call.circumstances, self.tree.delivered(fork.beside))

    def _sides(self, fork: Fork) -> str:
        """Both sides of a fork as text, from a little before it."""
        shared = fork.shared_tokens
        sides = [f"cause: {fork.cause.value}, after {shared} tokens"]
        for call in (fork.beside, fork.call):
            around = self.tree.history_ids(call)[max(0, shared - _AROUND_FORK_TOKENS) : shared + _AROUND_FORK_TOKENS]
            sides.append(f"{call}: {self._rendering.decode(around)!r}")
        return "\n".join(sides)

    def _restore_call(self, entry: CallStarted) -> None:
        call = call_of(entry)
        self._seq = max(self._seq, entry.seq + 1)
        self._roles.restore(call.part)
        self._course.restore(call.part)
        self._enter(call)

    def _stem(self, call: Call) -> str:
        opened = self.opened
        return digest("id", opened.run, str(opened.attempt), opened.key, str(call.seq)).hex()[:24]


def opened_record(opened: OpenRun) -> RunOpened:
    return RunOpened(
        run=opened.run,
        group=opened.group,
        attempt=opened.attempt,
        key=opened.key,
        profile=opened.profile,
        temperature=opened.temperature,
        max_tokens=opened.max_tokens,
    )
