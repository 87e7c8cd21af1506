"""Finding again what a run already said: which recorded answer each assistant turn of a request is.

A conversation is followed as a chain of digests. Where the chain stands at the end of a call's prompt, an assistant's
turn that bears the call's minted ids, or says what the call said, *is* that call's answer, and the chain goes on
through the call and not through the turn's text. So a harness may drop thinking, write arguments anew or trim, and its
next request still extends the recorded tokens. Pure; a digest of 16 bytes a call is all that a journal must keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gyre.ids import CallId
from gyre.proxy.conversation import Conversation, Message, Speaker, digest, message_key, tools_key


@dataclass(frozen=True)
class Walk:
    """Where a request stands among the run's calls."""

    thread: bytes
    """The chain's digest at the end of the request: calls with equal ones have the same prompt."""
    root: bytes
    """The chain's digest before the first assistant turn: what a thread of the run begins with."""
    base: CallId | None
    """The call whose answer is the last assistant turn recognised in its place."""
    new_from: int
    """Index of the first message after that turn; 0 without a base."""
    turns: tuple[CallId | None, ...]
    """For each message the recorded answer that it is, in its place or behind another prefix, or None."""


class Threads:
    """The answered calls of one run, by where they stood and by what they said."""

    def __init__(self) -> None:
        self._by_prompt: dict[bytes, list[CallId]] = {}
        self._by_id: dict[str, CallId] = {}
        self._by_content: dict[bytes, CallId] = {}
        self._content: dict[CallId, bytes] = {}

    def add(self, call: CallId, thread: bytes, content: bytes, ids: Iterable[str]) -> None:
        """An answered call: the walk's `thread`, the answer's key, and the ids that were minted for it."""
        self._by_prompt.setdefault(thread, []).append(call)
        self._by_content[content] = call
        self._content[call] = content
        for name in ids:
            self._by_id[name] = call

    def walk(self, conversation: Conversation) -> Walk:
        messages = conversation.messages
        chain = tools_key(conversation.tools)
        root = b""
        base: CallId | None = None
        new_from = 0
        turns: list[CallId | None] = []
        for place, message in enumerate(messages):
            turn: CallId | None = None
            if message.speaker is Speaker.ASSISTANT:
                root = root or chain
                key = message_key(message)
                turn = self._here(chain, message, key)
                if turn is not None:
                    base, new_from = turn, place + 1
                    chain = digest(chain, turn)
                else:
                    turn = self._elsewhere(message, key)
                    chain = digest(chain, key)
            else:
                chain = digest(chain, message_key(message))
            turns.append(turn)
        return Walk(chain, root or chain, base, new_from, tuple(turns))

    def _here(self, chain: bytes, message: Message, key: bytes) -> CallId | None:
        """The call whose prompt ends at `chain` and whose answer `message` is; of equal ones the newest."""
        candidates: Sequence[CallId] = self._by_prompt.get(chain, ())
        named = self._named(message)
        if named is not None and named in candidates:
            return named
        return next((call for call in reversed(candidates) if self._content[call] == key), None)

    def _elsewhere(self, message: Message, key: bytes) -> CallId | None:
        return self._named(message) or self._by_content.get(key)

    def _named(self, message: Message) -> CallId | None:
        return next((call for name in message.ids if (call := self._by_id.get(name)) is not None), None)
