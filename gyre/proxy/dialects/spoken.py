"""The dialects that are spoken here, and which of them a request is in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gyre.proxy.dialects.anthropic_messages import AnthropicMessages
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.dialects.openai_chat import OpenAIChat
from gyre.proxy.dialects.openai_responses import OpenAIResponses

_OF_ANTHROPIC = re.compile(r"/messages(/count_tokens|/batches(/.*)?)?/*$")
_OF_RESPONSES = re.compile(r"/responses(/.*)?$")
_OF_CHAT = re.compile(r"/chat/completions/*$")


@dataclass(frozen=True)
class Spoken:
    chat: OpenAIChat = field(default_factory=OpenAIChat)
    responses: OpenAIResponses = field(default_factory=OpenAIResponses)
    anthropic: AnthropicMessages = field(default_factory=AnthropicMessages)

    def by_name(self) -> dict[str, Dialect]:
        return {dialect.name: dialect for dialect in (self.chat, self.responses, self.anthropic)}

    def of(self, path: str, headers: Mapping[str, str]) -> Dialect:
        """By the path's end; where that is no dialect's own, by the header in which a client shows its key."""
        if _OF_ANTHROPIC.search(path):
            return self.anthropic
        if _OF_CHAT.search(path):
            return self.chat
        if _OF_RESPONSES.search(path):
            return self.responses
        return self.anthropic if "x-api-key" in headers or "anthropic-version" in headers else self.chat
