"""What the policy is warm-started on is, id for id, what it meets at run time."""

from __future__ import annotations

import random
from pathlib import Path

from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig

import gyre.demo
from gyre.demo.demonstrations import SYSTEM_PROMPT, Demonstration, demonstrate
from gyre.demo.rendering import DemonstrationRenderer
from gyre.demo.vocabulary import build_tokenizer
from gyre.proxy.conversation import Message, Speaker
from gyre.proxy.rendering import Rendering

TOKENIZER = build_tokenizer()
RENDERER = DemonstrationRenderer(TOKENIZER)


class OffsetAdapter:
    """A second, independent adapter, with the character offsets that the product's own may give."""

    name_or_path = "Qwen/Qwen3-8B"
    unk_token_id = TOKENIZER.token_to_id("<unk>")
    eos_token_id = TOKENIZER.token_to_id("<|im_end|>")

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: object) -> str:
        return TOKENIZER.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return TOKENIZER.token_to_id(token)

    def __call__(self, text: str, add_special_tokens: bool = False, **_: object) -> dict[str, object]:
        encoded = TOKENIZER.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}


def conversation(demonstration: Demonstration) -> list[dict[str, str]]:
    messages = list(demonstration.opening)
    for turn in demonstration.turns:
        messages.append({"role": "assistant", "content": turn.answer})
        if turn.observation is not None:
            messages.append({"role": "user", "content": turn.observation})
    return messages


def test_a_demonstration_is_the_ids_of_its_turns_rendered_one_by_one() -> None:
    library = create_renderer(OffsetAdapter(), Qwen3RendererConfig(thinking_retention="all"))
    rng = random.Random(1)
    for _ in range(100):
        demonstration = demonstrate(rng)
        messages, example = conversation(demonstration), RENDERER.example(demonstration)
        ids = list(library.render_ids(messages[:2], add_generation_prompt=True))
        for turn, reply in zip(demonstration.turns, [*messages[3::2], None], strict=True):
            answer = [*TOKENIZER.encode(turn.answer, add_special_tokens=False).ids, OffsetAdapter.eos_token_id]
            assert all(taught == turn.taught for taught in example.taught[len(ids) : len(ids) + len(answer)])
            if reply is None:
                ids += answer
                break
            bridged = library.bridge_to_next_turn(ids, answer, [reply])
            assert bridged is not None
            assert list(bridged.token_ids)[: len(ids) + len(answer)] == ids + answer
            ids = list(bridged.token_ids)
        assert list(example.token_ids) == ids


def test_turn_by_turn_equals_the_whole_conversation_rendered_at_once() -> None:
    rng = random.Random(2)
    for _ in range(100):
        demonstration = demonstrate(rng)
        opening = conversation(demonstration)[:-1]
        before_last = RENDERER.prompt(opening)
        example = RENDERER.example(demonstration)
        assert list(example.token_ids[: len(before_last)]) == before_last


def test_the_generation_prompt_adds_the_role_and_nothing_else() -> None:
    ids = RENDERER.prompt([{"role": "system", "content": "one command per answer"}, {"role": "user", "content": "do"}])
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\ndo<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_parses_back_to_its_text() -> None:
    library = create_renderer(OffsetAdapter(), Qwen3RendererConfig(thinking_retention="all"))
    demonstration = demonstrate(random.Random(4))
    prompt = RENDERER.prompt(demonstration.opening)
    for turn in demonstration.turns:
        parsed = library.parse_response(RENDERER.answer(turn.answer), prompt_ids=prompt)
        assert parsed.content == turn.answer
        assert not parsed.tool_calls


def test_the_gateway_renders_the_demonstrations_ids() -> None:
    gateway = Rendering(Path(gyre.demo.__file__).parent / "policy", thinking=True)
    rng = random.Random(5)
    for _ in range(30):
        demonstration = demonstrate(rng)
        example = RENDERER.example(demonstration)
        ids = gateway.opening([Message(Speaker.SYSTEM, SYSTEM_PROMPT), Message(Speaker.USER, demonstration.prompt)], ())
        for turn in demonstration.turns:
            answer = RENDERER.answer(turn.answer)
            assert gateway.parse(answer, ids).text == turn.answer
            ids += answer
            if turn.observation is not None:
                follows = gateway.bridge(ids[: -len(answer)], answer, [Message(Speaker.USER, turn.observation)], ())
                assert follows is not None
                ids += follows
        assert tuple(ids) == example.token_ids
