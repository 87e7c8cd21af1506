"""A request's prompt as token ids: recorded ids wherever the run said it before, new ids for what is new.

`Prompts` belongs to one run. Behind a recognised answer the prompt is that call's prompt and output and a bridge; a
prompt that begins anew is put together the same way, turn by turn, so that answers which reappear behind another prefix
(a compaction's kept tail) still stand there with the ids they were sampled with.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre.ids import CallId
from gyre.proxy.conversation import Conversation, Message, Speaker
from gyre.proxy.recognition import Walk
from gyre.proxy.rendering import TAIL_TOKENS, Rendering
from gyre.proxy.volatile import SystemPrompts
from gyre.trajectory.tree import Tree


@dataclass(frozen=True)
class Prompt:
    """`base`'s prompt and output, then `suffix`; without a base the suffix is the whole prompt."""

    base: CallId | None
    suffix: array[int]
    tokens: int
    """Of the whole prompt."""


class Prompts:
    """The prompts of the run whose calls are in `tree`. One that extends a call costs what is new in it."""

    def __init__(self, rendering: Rendering, tree: Tree, systems: SystemPrompts) -> None:
        self._rendering = rendering
        self._tree = tree
        self._systems = systems

    def of(self, conversation: Conversation, walk: Walk) -> Prompt:
        if walk.base is not None:
            tail, output = self._tree.prompt_tail(walk.base, TAIL_TOKENS), self._tree.output_ids(walk.base)
            new = [self._systems.rendered(message) for message in conversation.messages[walk.new_from :]]
            suffix = self._extended(tail, output, new, walk.turns[walk.new_from :], conversation.tools)
            if suffix is not None:
                return Prompt(walk.base, suffix, self._tree.end_tokens(walk.base) + len(suffix))
        messages = [self._systems.rendered(message) for message in conversation.messages]
        whole = self._whole(messages, walk.turns, conversation.tools)
        return Prompt(None, whole, len(whole))

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
                ids = self._tree.output_ids(turn) if turn is not None else self._rendering.assistant(messages[place])
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
