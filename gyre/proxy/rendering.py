"""Messages to token ids and back, for one model: its tokenizer, and the renderer of its family.

`renderers` and `tokenizers` are imported when a `Rendering` is made and not before, so that nothing else of the proxy
costs their memory. What was sampled is never rendered again: a next prompt is the recorded ids and `bridge`.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from gyre.errors import BadInput
from gyre.proxy.bodies import is_deeper
from gyre.proxy.conversation import Message, Speaker, ToolCall
from gyre.proxy.faults import bad_request

_FAMILY_OF_MODEL_TYPE = {
    "deepseek_v3": "deepseek-v3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi-k2",
    "llama": "llama-3",
    "minimax_m2": "minimax-m2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_vl": "qwen3-vl",
}
_DEEPEST_ARGUMENTS = 100
"""Levels of a sampled call's arguments. They come back inside a body, which may itself be nested only so deep."""
TAIL_TOKENS = 512
"""As much of a recorded prompt's end as a bridge looks at: its generation prompt, and some room."""

_SEAM = "\udfff\ud800"
"""Where a text is encoded in two pieces. No text has it: its halves are no characters, and in the wrong order."""
_OFTEN_LETTERS = 32
"""Texts up to this length are kept encoded: what a template puts between messages comes again with each of them."""
_ANY_USER: list[Any] = [{"role": "user", "content": "-"}]


@dataclass(frozen=True)
class ParsedOutput:
    """An output as a message. A tool call that is not well formed stays in the text, where the harness can see it."""

    text: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    """(name, arguments as JSON text)."""
    reasoning_tokens: int


class Rendering:
    """The model's text form. `thinking` asks for prompts in which the model may think."""

    def __init__(self, model_dir: Path, renderer: str = "auto", *, thinking: bool = False) -> None:
        self._tokenizer = _Tokenizer(model_dir)
        library = _renderers()
        config = _renderer_config(library, _family(model_dir, renderer))
        asked: dict[str, Any] = {"thinking_retention": "all"}
        if "enable_thinking" in library.template_field_names(config):
            asked["enable_thinking"] = thinking
        try:
            # By name, since `create_renderer` would import every family.
            family = getattr(library, type(config).__name__.removesuffix("Config"))
            self._renderer: Any = family(self._tokenizer, type(config)(**asked))
        except (AssertionError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise BadInput("model.renderer", config.name, f"it does not fit the model's tokenizer: {reason}") from error
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self._thought_end: int | None = self._tokenizer.convert_tokens_to_ids("</think>")
        self._any_opening = self._rendered(_ANY_USER, (), generation=True)
        self._any_output = [*self._tokenizer.encode("ok"), self.stop_token_ids[0]]
        self._another_turn = self._between_turns()

    # ------------------------------------------------------------------------------------------ messages to ids

    def opening(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """The whole prompt, history as the model's own template has it. Raises Fault(BAD_REQUEST) for what it cannot."""
        try:
            return self._rendered(self._plain(messages), tools, generation=True)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise bad_request(f"messages: they cannot be rendered for this model ({error})") from error

    def bridge(
        self, prompt: Sequence[int], output: Sequence[int], messages: Sequence[Message], tools: Sequence[Any]
    ) -> list[int] | None:
        """The ids that follow `prompt` + `output` when `messages` come next, up to the next generation prompt.

        Costs the new messages only. Without any, one more turn of the assistant's begins. None where this family cannot
        go on behind recorded ids.
        """
        if not messages:
            ended = bool(output) and output[-1] in self.stop_token_ids
            return self._another_turn and [*self.stop_token_ids[: not ended], *self._another_turn]
        tail = list(prompt[-TAIL_TOKENS:])
        suffix = self._bridged(tail, list(output), messages, tools)
        if suffix is None:
            # The output does not parse as a turn (thinking that was never closed, say): end it, and go on behind it.
            suffix = self._bridged(self._any_opening, self._any_output, messages, tools)
            if suffix is not None and not (output and output[-1] in self.stop_token_ids):
                suffix = [self.stop_token_ids[0], *suffix]
        return suffix

    def assistant(self, message: Message) -> list[int] | None:
        """The ids of an assistant's turn not sampled here, as they stand behind a generation prompt, or None.

        They are the same whatever tools are offered: those stand at a prompt's beginning.
        """
        whole = self._rendered([*_ANY_USER, *self._plain([message])], (), generation=False)
        if whole[: len(self._any_opening)] != self._any_opening:
            return None
        turn = whole[len(self._any_opening) :]
        ends = [place for place, token in enumerate(turn) if token in self.stop_token_ids]
        return turn[: ends[-1] + 1] if ends else turn

    def _rendered(self, messages: list[Any], tools: Sequence[Any], *, generation: bool) -> list[int]:
        ids = self._renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=generation)
        return list(ids)

    def _bridged(
        self, prompt: list[int], output: list[int], messages: Sequence[Message], tools: Sequence[Any]
    ) -> list[int] | None:
        known = prompt + output
        try:
            bridged = self._renderer.bridge_to_next_turn(
                prompt, output, self._plain(messages), tools=list(tools) or None
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise bad_request(f"messages: they cannot be rendered for this model ({error})") from error
        if bridged is None:
            return None
        ids = list(bridged.token_ids)
        return ids[len(known) :] if ids[: len(known)] == known else None

    def _between_turns(self) -> list[int] | None:
        """The ids from an assistant's turn's end to the next generation prompt, where nothing stands between."""
        turn = Message(Speaker.ASSISTANT, "ok")
        ids = self.assistant(turn)
        if not ids or ids[-1] not in self.stop_token_ids:
            return None
        whole = self._rendered([*_ANY_USER, *self._plain([turn])], (), generation=True)
        return whole[len(self._any_opening) + len(ids) :]

    def _plain(self, messages: Sequence[Message]) -> list[Any]:
        plain: list[Any] = []
        for message in messages:
            entry: dict[str, Any] = {"role": message.speaker.value, "content": message.text}
            if message.reasoning:
                entry["reasoning_content"] = message.reasoning
            if message.tool_calls:
                entry["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
            if message.speaker is Speaker.TOOL:
                entry["content"] = self._tokenizer.seamed(message.text)
                entry["tool_call_id"] = message.tool_call_id
            plain.append(entry)
        return plain

    # ------------------------------------------------------------------------------------------ ids to messages

    def parse(self, output: Sequence[int], prompt: Sequence[int]) -> ParsedOutput:
        """What the policy said in `output`, sampled behind `prompt`."""
        try:
            parsed = self._renderer.parse_response(list(output), prompt_ids=list(prompt[-TAIL_TOKENS:]))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            # A policy may sample anything; what the family's parser cannot take is plain text.
            ids = [token for token in output if token not in self.stop_token_ids]
            return ParsedOutput(text=self.decode(ids), reasoning="", tool_calls=(), reasoning_tokens=0)
        text, calls = parsed.content, list[tuple[str, str]]()
        for call in parsed.tool_calls:
            name, arguments = call.name, _arguments(call.arguments)
            if call.status == "ok" and isinstance(name, str) and name and arguments is not None:
                calls.append((name, arguments))
            else:
                text += f"<tool_call>\n{call.raw}".rstrip()
                if call.status != "unclosed_block":
                    text += "\n</tool_call>"
        reasoning = parsed.reasoning_content or ""
        return ParsedOutput(text, reasoning, tuple(calls), self._reasoning_tokens(output, reasoning))

    def _reasoning_tokens(self, output: Sequence[int], reasoning: str) -> int:
        if not reasoning:
            return 0
        if self._thought_end is None:
            return len(self._tokenizer.encode(reasoning))
        return list(output).index(self._thought_end) + 1 if self._thought_end in output else len(output)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


def _arguments(value: Any) -> str | None:
    """A call's arguments as JSON text, or None where they are none that every client can read and send back."""
    try:
        read = json.loads(value) if isinstance(value, str) else value
        if not isinstance(read, dict) or is_deeper(cast("object", read), _DEEPEST_ARGUMENTS):
            return None
        return json.dumps(read, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # ValueError also where a number is none, or has no end
        return None


def _plain_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _family(model_dir: Path, renderer: str) -> str:
    if renderer != "auto":
        return renderer
    path = model_dir / "config.json"
    try:
        model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput("model.path", str(model_dir), "a folder with the model's config.json is needed") from error
    family = _FAMILY_OF_MODEL_TYPE.get(model_type)
    if family is None:
        known = ", ".join(sorted(_FAMILY_OF_MODEL_TYPE))
        raise BadInput(
            "model.renderer", "auto", f"model type {model_type!r} has no renderer of its own; known: {known}"
        )
    return family


def _renderers() -> Any:
    """The library without its client for inference servers, which nothing here uses.

    The client brings the whole `openai` package: two thirds of the import's time, which a harness waits for when a
    gateway is started again, and 40 MB.
    """
    if "renderers" not in sys.modules and "renderers.client" not in sys.modules:
        stand_in = ModuleType("renderers.client")
        stand_in.__dict__["__getattr__"] = _nothing
        sys.modules["renderers.client"] = stand_in
        try:
            return importlib.import_module("renderers")
        finally:
            del sys.modules["renderers.client"]
    return importlib.import_module("renderers")


def _nothing(name: str) -> type:
    """Stands for whatever is asked of the client that is left out."""
    return type(name, (Exception,), {})


def _renderer_config(library: Any, family: str) -> Any:
    if family != "default":
        try:
            config = library.config_from_name(family)
        except (KeyError, ValueError):
            config = None
        if config is not None:
            return config
    known = ", ".join(sorted({*_FAMILY_OF_MODEL_TYPE.values(), "auto"}))
    raise BadInput(
        "model.renderer", family, f"a renderer that can go on behind recorded ids: {known}, and others of `renderers`"
    )


class _Tokenizer:
    """The folder's `tokenizer.json`, with what `renderers` asks of a tokenizer."""

    def __init__(self, model_dir: Path) -> None:
        from tokenizers import Tokenizer

        path = model_dir / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise BadInput("model.path", str(model_dir), f"a readable tokenizer.json is needed ({error})") from error
        # What a harness or a tool says is text, also where it spells the tokens that begin and end a turn.
        self._tokenizer.encode_special_tokens = True
        frames = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if not token.special]
        self._frame = re.compile("|".join(map(re.escape, frames)) or "(?!)")
        self._often = lru_cache(maxsize=1024)(self._encoded)
        self.name_or_path = ""
        self.unk_token_id: int | None = self._tokenizer.token_to_id("<unk>")
        self.eos_token_id: int | None = next(
            (
                token
                for name in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>")
                if (token := self._tokenizer.token_to_id(name)) is not None
            ),
            None,
        )

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return list(self._often(text) if len(text) <= _OFTEN_LETTERS else self._encoded(text))

    def seamed(self, text: str) -> str:
        """The text of a tool's result, in which nothing ends the frame that the template puts around it, nor opens one."""
        return self._frame.sub(lambda found: found[0][:1] + _SEAM + found[0][1:], text)

    def _encoded(self, text: str) -> list[int]:
        pieces = text.split(_SEAM)
        # A batch: `encode` would hold the interpreter for as long as it takes, and every run with it.
        try:
            encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        except TypeError as error:
            raise ValueError("a text has half of a surrogate pair, which is no character") from error
        return encodings[0].ids if len(pieces) == 1 else [token for encoding in encodings for token in encoding.ids]

    def decode(self, token_ids: Sequence[int] | int, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]
