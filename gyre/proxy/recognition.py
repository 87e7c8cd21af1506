"""Finding again what a run already said: which recorded answer each assistant turn of a request is.

A conversation is followed as a chain: a running digest. Where the chain stands at the end of a call's prompt, an
assistant's turn that bears the call's minted ids, or says what the call said, *is* that call's answer, and the chain
goes on through the call and not through the turn's text. So a harness may drop thinking, write arguments anew or trim,
and its next request still extends the recorded tokens. Pure; a digest of 16 bytes a call is all that a journal must keep.

A harness sends its whole history every time. Of a thread's next request the part that its last one had too is compared,
at memory speed, and not followed again: beside that a walk costs what is new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from gyre.ids import CallId
from gyre.proxy.conversation import Answer, Message, Speaker, answer_key, message_key, tools_key
from gyre.proxy.volatile import SystemPrompts

_TAG = {Speaker.SYSTEM: b"s", Speaker.USER: b"u", Speaker.TOOL: b"t"}
_TURN, _CALL = b"a", b"c"
_FOLLOWED = 4
"""Threads of a run whose last requests are kept: those that take turns, a main thread and its sub-agents."""


@dataclass(frozen=True)
class Walk:
    """Where a request stands among the run's calls."""

    chain: bytes
    """The chain's digest at the end of the request: calls with equal ones have the same prompt."""
    base: CallId | None
    """The call whose answer is the last assistant turn recognised in its place."""
    new_from: int
    """Index of the first message after that turn; 0 without a base."""
    turns: tuple[CallId | None, ...]
    """For each message the recorded answer that it is, in its place or behind another prefix, or None."""
    left: CallId | None
    """The last call that had an answer, and whose prompt the request goes on from without that answer."""
    begins: bool
    """Whether no answer of the run is in it yet."""


class _Said(NamedTuple):
    """What is kept of an answer to know it by."""

    key: bytes
    thread: str
    tool_calls: frozenset[str]
    text_length: int


class _Followed(NamedTuple):
    """How far one thread was followed."""

    messages: tuple[tuple[Any, ...], ...]
    """As plain tuples of texts, which equal messages and which the garbage collector need not walk."""
    chain: xxhash.xxh3_128
    base: CallId | None
    left: CallId | None
    new_from: int
    turns: tuple[CallId | None, ...]
    rewritten: bool
    """An assistant's turn of the harness's own stands where the answer to an earlier prompt was."""


class Threads:
    """The answered calls of one run, by where they stood and by what they said."""

    def __init__(self, systems: SystemPrompts) -> None:
        self._systems = systems
        self._followed: OrderedDict[tuple[str, bytes, str], _Followed] = OrderedDict()
        self._by_chain: dict[bytes, list[CallId]] = {}
        self._by_id: dict[str, CallId] = {}
        self._by_content: dict[bytes, CallId] = {}
        self._said: dict[CallId, _Said] = {}

    def add(self, call: CallId, chain: bytes, name: str, answer: Answer, ids: Iterable[str]) -> None:
        """An answered call: its walk's `chain`, its thread's name, and the ids that were minted for its answer."""
        key = answer_key(answer.text, answer.tool_calls)
        self._by_chain.setdefault(chain, []).append(call)
        self._by_content[key] = call
        tool_calls = frozenset(tool_call.id for tool_call in answer.tool_calls)
        self._said[call] = _Said(key, name, tool_calls, len(answer.text.strip()))
        for minted in ids:
            self._by_id[minted] = call

    def walk(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], name: str) -> Walk:
        """Where a request with these messages stands; `name` is its thread's."""
        messages = self._with_steady_opening(messages)
        toolset = tools_key(tools)
        thread = name, toolset, messages[0].text
        known = self._followed.pop(thread, None)
        if known is None or messages[: len(known.messages)] != known.messages:
            known = _Followed((), xxhash.xxh3_128(toolset), None, None, 0, (), rewritten=False)
        walk = self._followed[thread] = self._follow(known, messages, name)
        if len(self._followed) > _FOLLOWED:
            self._followed.popitem(last=False)
        return Walk(
            chain=walk.chain.digest(),
            base=walk.base,
            new_from=walk.new_from,
            turns=walk.turns,
            left=walk.left,
            begins=not walk.rewritten and all(turn is None for turn in walk.turns),
        )

    def _follow(self, known: _Followed, messages: tuple[Message, ...], name: str) -> _Followed:
        """Go on from what was followed before to the end of the messages. A system prompt at their start is steady."""
        chain, base, left, new_from = known.chain.copy(), known.base, known.left, known.new_from
        turns, rewritten = list(known.turns), known.rewritten
        new = messages[len(known.messages) :]
        for place, message in enumerate(new, len(known.messages)):
            turn: CallId | None = None
            if message.speaker is Speaker.ASSISTANT:
                turn = self._here(chain.digest(), message, name)
                if turn is not None:
                    base, new_from, left = turn, place + 1, None
                    _extend(chain, _CALL, turn)
                else:
                    key = message_key(message)
                    turn = self._named(message) or self._by_content.get(key)
                    rewritten = rewritten or (turn is None and chain.digest() in self._by_chain)
                    chain.update(_TURN + key)
            else:
                if place and messages[place - 1].speaker is not Speaker.ASSISTANT:
                    left = self._newest(self._by_chain.get(chain.digest(), ()), name) or left
                again = place > 0 and message.speaker is Speaker.SYSTEM
                text = self._systems.read(message.text).steady if again else message.text
                _extend(chain, _TAG[message.speaker], text)
            turns.append(turn)
        return _Followed(known.messages + tuple(map(_plain, new)), chain, base, left, new_from, tuple(turns), rewritten)

    def _with_steady_opening(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """With the system prompt by its steady part, so that a clock in it does not make all of a history new."""
        first = messages[0]
        if first.speaker is not Speaker.SYSTEM:
            return tuple(messages)
        return (first._replace(text=self._systems.read(first.text).steady), *messages[1:])

    def _here(self, chain: bytes, message: Message, name: str) -> CallId | None:
        """The call whose prompt ends at `chain` and whose answer `message` is; of equal ones its thread's newest."""
        candidates = self._by_chain.get(chain)
        if candidates is None:
            return None
        named = self._named(message)
        if named is not None and named in candidates:
            return named
        key = message_key(message)
        return self._newest([call for call in candidates if self._said[call].key == key], name)

    def _newest(self, calls: Sequence[CallId], name: str) -> CallId | None:
        """The newest of the calls, one of the thread `name` before all others."""
        own = (call for call in reversed(calls) if self._said[call].thread == name)
        return next(own, calls[-1] if calls else None)

    def _named(self, message: Message) -> CallId | None:
        """The call that minted the message's ids, where the message is its whole answer and not the half of one.

        Thinking may be dropped and tool calls may be written anew, but a tool call that is missing was never taken in,
        and neither was a text that breaks off.
        """
        call = next((call for name in message.ids if (call := self._by_id.get(name)) is not None), None)
        if call is None:
            return None
        said = self._said[call]
        if said.tool_calls:
            return call if said.tool_calls.issubset(message.ids) else None
        return call if len(message.text.strip()) >= said.text_length else None


def _plain(message: Message) -> tuple[Any, ...]:
    speaker, text, reasoning, tool_calls, tool_call_id, ids = message
    return speaker.value, text, reasoning, tuple(tuple(call) for call in tool_calls), tool_call_id, ids


def _extend(chain: xxhash.xxh3_128, tag: bytes, text: str) -> None:
    """Add a message in such a way that none can pass for the end of another."""
    data = text.encode("utf-8", "surrogatepass")
    chain.update(tag + len(data).to_bytes(8, "little"))
    chain.update(data)
