"""Demonstrations as token ids: rendered turn by turn through the library that renders them at run time.

So the policy is trained on exactly the ids that it meets later: each answer follows the generation prompt and ends with
the turn's end token, and the next prompt is what the renderer's bridge puts after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig
from tokenizers import Tokenizer

from gyre.demo.demonstrations import Demonstration
from gyre.demo.vocabulary import TURN_END, UNKNOWN, token_id


@dataclass(frozen=True)
class TrainingExample:
    """One rendered demonstration; `taught` marks the tokens that the policy is to sample."""

    token_ids: tuple[int, ...]
    taught: tuple[bool, ...]


class DemonstrationRenderer:
    """Renders with the Qwen3 renderer in the setting with the fewest tokens.

    `enable_thinking` adds nothing to a generation prompt (without it an empty thinking block would be put there), and
    `thinking_retention="all"` lets the bridge go on after a user message, which is how the harness reports a command.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        adapter = _TokenizerAdapter(tokenizer)
        self._renderer = create_renderer(
            cast(Any, adapter), Qwen3RendererConfig(enable_thinking=True, thinking_retention="all")
        )
        self._encode = adapter.encode
        self._turn_end = token_id(tokenizer, TURN_END)

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids of an opening, with the generation prompt after it."""
        return list(self._renderer.render_ids(cast(Any, list(messages)), add_generation_prompt=True))

    def bridge(self, prompt: list[int], answer: list[int], reply: str) -> list[int]:
        """The prompt after `answer` and the harness's `reply`; begins with exactly `prompt + answer`."""
        messages = cast(Any, [{"role": "user", "content": reply}])
        bridged = self._renderer.bridge_to_next_turn(prompt, answer, messages)
        assert bridged is not None, "the renderer does not bridge this turn"
        return list(bridged.token_ids)

    def answer(self, text: str) -> list[int]:
        """The ids of an answer as the policy is to sample them, its end included."""
        return [*self._encode(text), self._turn_end]

    def example(self, demonstration: Demonstration, opening: Sequence[dict[str, str]] | None = None) -> TrainingExample:
        """The whole run as one row of ids."""
        ids = self.prompt(demonstration.opening if opening is None else opening)
        taught = [False] * len(ids)
        for turn in demonstration.turns:
            answer = self.answer(turn.answer)
            taught += [turn.taught] * len(answer)
            if turn.observation is None:
                ids = ids + answer
                break
            ids = self.bridge(ids, answer, turn.observation)
            taught += [False] * (len(ids) - len(taught))
        return TrainingExample(tuple(ids), tuple(taught))


class _TokenizerAdapter:
    """What `renderers` asks of a tokenizer."""

    name_or_path = "Qwen/Qwen3-0.6B"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.unk_token_id: int | None = tokenizer.token_to_id(UNKNOWN)
        self.eos_token_id: int | None = tokenizer.token_to_id(TURN_END)

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        return self._tokenizer.token_to_id(tokens)
