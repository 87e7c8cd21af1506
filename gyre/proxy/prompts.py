"""A request's prompt as token ids: recorded ids wherever the run said it before, new ids for what is new.

`Prompts` belongs to one run. Behind a recognised answer the prompt is that call's prompt and output and a bridge; a
prompt that begins anew is put together the same way, turn by turn, so that answers which reappear behind another prefix
(a compaction's kept tail) still stand there with the ids they were sampled with.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre.ids import CallId
from gyre.proxy.conversation import Conversation, Message, Speaker, message_key
from gyre.proxy.recognition import Walk
from gyre.proxy.rendering import Rendering
from gyre.proxy.volatile import without_headers


@dataclass(frozen=True)
class Prompt:
    """`base`'s prompt and output, then `suffix`; without a base the suffix is the whole prompt."""

    base: CallId | None
    suffix: array[int]
    token_ids: array[int]


class Prompts:
    """`history(call)` gives a call's prompt and output, `output(call)` its output."""

    def __init__(
        self,
        rendering: Rendering,
        history: Callable[[CallId], tuple[array[int], array[int]]],
        output: Callable[[CallId], array[int]],
    ) -> None:
        self._rendering = rendering
        self._history = history
        self._output = output
        self._systems: dict[bytes, str] = {}

    def of(self, conversation: Conversation, walk: Walk) -> Prompt:
        if walk.base is not None:
            prompt, output = self._history(walk.base)
            new = [self._pinned(message) for message in conversation.messages[walk.new_from :]]
            suffix = self._extended(prompt, output, new, walk.turns[walk.new_from :], conversation.tools)
            if suffix is not None:
                return Prompt(walk.base, suffix, prompt + output + suffix)
        messages = [self._pinned(message) for message in conversation.messages]
        whole = self._whole(messages, walk.turns, conversation.tools)
        return Prompt(None, whole, whole)

    def _whole(
        self, messages: Sequence[Message], turns: Sequence[CallId | None], tools: Sequence[Mapping[str, Any]]
    ) -> array[int]:
        speakers = [message.speaker for message in messages]
        first = speakers.index(Speaker.ASSISTANT) if Speaker.ASSISTANT in speakers else len(messages)
        if 0 < first < len(messages):
            head = array("i", self._rendering.opening(messages[:first], tools))
            rest = self._extended(head, None, messages[first:], turns[first:], tools)
            if rest is not None:
                return head + rest
        return array("i", self._rendering.opening(messages, tools))

    def _extended(
        self,
        prompt: array[int],
        output: array[int] | None,
        messages: Sequence[Message],
        turns: Sequence[CallId | None],
        tools: Sequence[Mapping[str, Any]],
    ) -> array[int] | None:
        """The ids behind `prompt` + `output` that end with a generation prompt, or None where they cannot be had.

        `messages` begin with an assistant's turn where `output` is None.
        """
        added = array("i")
        place = 0
        while True:
            if output is None:
                if place == len(messages):
                    return None  # a conversation that ends with an assistant's turn asks for no new one
                turn = turns[place]
                ids = self._output(turn) if turn is not None else self._rendering.assistant(messages[place], tools)
                if ids is None:
                    return None
                output = array("i", ids)
                added += output
                place += 1
            end = place
            while end < len(messages) and messages[end].speaker is not Speaker.ASSISTANT:
                end += 1
            bridge = self._rendering.bridge(prompt, output, messages[place:end], tools)
            if bridge is None:
                return None
            added.extend(bridge)
            if end == len(messages):
                return added
            prompt, output, place = array("i", bridge), None, end

    def _pinned(self, message: Message) -> Message:
        """A system prompt as it was first seen in this run, whatever volatile part of it has changed since."""
        if message.speaker is not Speaker.SYSTEM:
            return message
        return replace(message, text=self._systems.setdefault(message_key(message), without_headers(message.text)))
