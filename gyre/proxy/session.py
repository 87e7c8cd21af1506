"""One run at the gateway: its tree, its calls, and what a request means beside them.

Nothing here waits, samples or writes. The gateway asks `find` whether a request is a retry, `begin` what to sample for
it, tells `end` what was sampled and `deliver` that the harness has it, and journals the records that each returns.
`restore` makes the same session again from the journal.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre.actors.messages import OpenRun
from gyre.ids import CallId
from gyre.proxy.conversation import Answer, Conversation, Finish, Reply, ToolCall, answer_key, digest
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.faults import bad_request, too_long
from gyre.proxy.prompts import Prompt, Prompts
from gyre.proxy.recognition import Threads, Walk
from gyre.proxy.rendering import Rendering
from gyre.proxy.roles import Roles, opening
from gyre.proxy.sampling import Cached, Ending, Stretch
from gyre.proxy.stops import before_stop
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
from gyre.trajectory.tree import Tree


@dataclass
class Call:
    """One call, from its request on. The tokens of an ended call are in the tree and nowhere else."""

    id: CallId
    seq: int
    digest: bytes
    dialect: str
    started_unix_s: float
    thread: bytes
    role: LineageRole
    base: CallId | None
    suffix: array[int]
    max_tokens: int
    stop: tuple[str, ...]
    seed: int | None
    output: array[int] = field(default_factory=lambda: array("i"))
    """What was sampled so far, until the call has ended; so are the next two."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    answer: Answer | None = None
    cached: Cached | None = None
    """Where its prompt and output were computed last."""


_RENDERED = frozenset({"messages", "system", "tools"})
"""Fields of a body that its prompt's tokens hold, and that the journal need not repeat."""


class Session:
    """One attempt of one run, open."""

    def __init__(self, opened: OpenRun, rendering: Rendering, dialects: Mapping[str, Dialect]) -> None:
        self.opened = opened
        self.tree = Tree(opened.run, opened.attempt)
        self.failure = ""
        """Why the run was stopped, or empty."""
        self.continued_calls = 0
        self.interrupted_calls = 0
        self.recomputed_tokens = 0
        self.max_silence_s = 0.0
        self._rendering = rendering
        self._dialects = dialects
        self._calls: dict[CallId, Call] = {}
        self._by_digest: dict[bytes, Call] = {}
        self._seq = 0
        self._threads = Threads()
        self._roles = Roles()
        self._prompts = Prompts(
            rendering,
            lambda call: (self.tree.prompt_ids(call), self.tree.output_ids(call)),
            self.tree.output_ids,
        )

    # ------------------------------------------------------------------------------------------ a call's life

    def find(self, body_digest: bytes) -> Call | None:
        """The call that a request with this digest repeats."""
        return self._by_digest.get(body_digest)

    def outgrown(self, call: Call, conversation: Conversation, context_tokens: int) -> bool:
        """Whether an equal request asks for more than `call` could say: the harness had it, cut at its limit."""
        answer = call.answer
        if answer is None or answer.finish is not Finish.LENGTH or not self.tree.delivered(call.id):
            return False
        return self._limit(conversation, context_tokens - answer.prompt_tokens) > call.max_tokens

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
        walk = self._threads.walk(conversation)
        prompt = self._prompt(conversation, walk)
        room = context_tokens - len(prompt.token_ids)
        if room < 1:
            raise too_long(len(prompt.token_ids), context_tokens)
        call = Call(
            id=CallId(f"{self.opened.run}.{self.opened.attempt}.{self._seq}"),
            seq=self._seq,
            digest=body_digest,
            dialect=dialect.name,
            started_unix_s=now_unix_s,
            thread=walk.thread,
            role=self._roles.of(conversation, headers),
            base=prompt.base,
            suffix=prompt.suffix,
            max_tokens=self._limit(conversation, room),
            stop=conversation.stop,
            seed=conversation.seed,
        )
        self._seq += 1
        self._enter(call)
        # Answers that the harness sends back have reached it, whatever was thought before.
        returned = [self.deliver(turn) for turn in walk.turns if turn is not None]
        records: list[JournalRecord] = [record for record in returned if record is not None]
        kept = {key: value for key, value in body.items() if key not in _RENDERED}
        request = {
            "thread": walk.thread.hex(),
            "opening": opening(conversation).hex(),
            "stop": list(conversation.stop),
            "seed": conversation.seed,
            "body": kept,
        }
        records.append(
            CallStarted(
                call=call.id,
                seq=call.seq,
                started_unix_s=now_unix_s,
                dialect=call.dialect,
                digest=body_digest,
                role=call.role,
                base=call.base,
                suffix=call.suffix.tobytes(),
                max_tokens=call.max_tokens,
                request=json.dumps(request).encode(),
            )
        )
        return call, records

    def count_tokens(self, conversation: Conversation) -> int:
        """Tokens of the prompt that the conversation would have now."""
        return len(self._prompt(conversation, self._threads.walk(conversation)).token_ids)

    def prompt_of(self, call: Call) -> array[int]:
        if call.id in self.tree:
            return self.tree.prompt_ids(call.id)
        if call.base is None:
            return call.suffix
        return self.tree.prompt_ids(call.base) + self.tree.output_ids(call.base) + call.suffix

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
        minted = self._settle(call, plain)
        return CallEnded(call=call.id, finish=ending.finish.value, minted=minted, answer=json.dumps(plain).encode())

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
        return CallDelivered(call=call)

    def reply(self, call: Call, model: str) -> Reply:
        """The answer of an ended call under its names, which are the same each time."""
        assert call.answer is not None
        name = self._dialects[call.dialect].message_id(self._stem(call))
        return Reply(message_id=name, model=model, created_unix_s=int(call.started_unix_s), answer=call.answer)

    # ------------------------------------------------------------------------------------------ the run

    @property
    def answered_calls(self) -> int:
        return sum(1 for call in self.tree.calls if self.tree.delivered(call))

    def latest(self) -> Call | None:
        """The call that ended last: what the run's next request most likely builds upon."""
        ended = self.tree.calls
        return self._calls[ended[-1]] if ended else None

    def trace(self, j_max: int) -> tuple[RunTrace, tuple[Any, ...]]:
        """The run's figures and its selected lineages."""
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
                    self._settle(call, json.loads(entry.answer))
                case CallDelivered() if entry.call in self.tree:
                    self.tree.deliver(entry.call)
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

    def _limit(self, conversation: Conversation, room: int) -> int:
        """Tokens that the request's answer may have, where the context has room for `room`."""
        return min(room, self.opened.max_tokens, conversation.max_tokens or self.opened.max_tokens)

    def _enter(self, call: Call) -> None:
        self._calls[call.id] = call
        self._by_digest[call.digest] = call

    def _settle(self, call: Call, end: Mapping[str, Any]) -> tuple[str, ...]:
        """Take an ended call in, from its own end or the journal's; returns the ids that were minted for it."""
        # A suffix ends with the generation prompt: all of the prompt that parsing looks at.
        parsed = self._rendering.parse(call.output, call.suffix)
        dialect, stem = self._dialects[call.dialect], self._stem(call)
        calls = tuple(
            ToolCall(dialect.mint(stem, place), name, arguments)
            for place, (name, arguments) in enumerate(parsed.tool_calls)
        )
        self.tree.add_call(
            call.id, call.base, call.suffix, call.output, call.logprobs, call.versions, call.role, delivered=False
        )
        call.answer = Answer(
            text=before_stop(parsed.text, end["stop_sequence"]),
            reasoning=parsed.reasoning,
            tool_calls=calls,
            finish=Finish(end["finish"]),
            stop_sequence=end["stop_sequence"],
            prompt_tokens=self.tree.prompt_tokens(call.id),
            output_tokens=len(call.output),
            cached_tokens=end["cached_tokens"],
        )
        minted = self.reply(call, "").ids()
        self._threads.add(call.id, call.thread, answer_key(call.answer.text, calls), minted)
        self.continued_calls += end["continued"]
        self.recomputed_tokens += end["recomputed_tokens"]
        self.max_silence_s = max(self.max_silence_s, end["silence_s"])
        call.suffix, call.output, call.logprobs, call.versions = array("i"), array("i"), array("f"), array("i")
        return minted

    def _restore_call(self, entry: CallStarted) -> None:
        request = json.loads(entry.request)
        suffix = array("i")
        suffix.frombytes(entry.suffix)
        call = Call(
            id=entry.call,
            seq=entry.seq,
            digest=entry.digest,
            dialect=entry.dialect,
            started_unix_s=entry.started_unix_s,
            thread=bytes.fromhex(request["thread"]),
            role=entry.role,
            base=entry.base,
            suffix=suffix,
            max_tokens=entry.max_tokens,
            stop=tuple(request["stop"]),
            seed=request["seed"],
        )
        self._seq = max(self._seq, entry.seq + 1)
        self._roles.restore(entry.role, bytes.fromhex(request["opening"]))
        self._enter(call)

    def _stem(self, call: Call) -> str:
        opened = self.opened
        return digest("id", opened.run, str(opened.attempt), opened.key, str(call.seq)).hex()[:24]


def opened_record(opened: OpenRun) -> RunOpened:
    return RunOpened(
        run=opened.run,
        attempt=opened.attempt,
        key=opened.key,
        profile=opened.profile,
        temperature=opened.temperature,
        max_tokens=opened.max_tokens,
    )
