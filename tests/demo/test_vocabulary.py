"""The policy's tokenizer: the words of the tasks, and an alphabet that can do no harm."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import gyre.demo
from gyre.demo.chores import heldout_task, train_task
from gyre.demo.demonstrations import COMMANDS, SUBMIT, demonstrate, fenced, observation
from gyre.demo.vocabulary import SPECIAL_TOKENS, UNKNOWN, VOCABULARY_TOKENS, build_tokenizer

POLICY = Path(gyre.demo.__file__).parent / "policy"
TOKENIZER = build_tokenizer()
UNKNOWN_ID = TOKENIZER.token_to_id(UNKNOWN)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def test_the_shipped_tokenizer_is_the_one_that_is_built() -> None:
    shipped = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    assert shipped.to_str() == TOKENIZER.to_str()
    assert TOKENIZER.get_vocab_size() == VOCABULARY_TOKENS == len(set(TOKENIZER.get_vocab().values()))


@pytest.mark.parametrize("character", list("/.~$|&*;()\\#=%^@`"))
def test_no_token_that_the_policy_can_sample_holds_a_character_that_could_do_harm(character: str) -> None:
    holding = [token for token in TOKENIZER.get_vocab() if character in token and token not in SPECIAL_TOKENS]
    allowed = {"`": ["```\n", "\n```"], "|": [token for token in holding if token.startswith("<|reserved_")]}
    assert sorted(holding) == sorted(allowed.get(character, []))


def test_each_special_token_is_one_id_and_ordinary_text_never_makes_one() -> None:
    for token in SPECIAL_TOKENS:
        assert encode(token) == [TOKENIZER.token_to_id(token)]
    assert UNKNOWN_ID not in [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS]


def test_tasks_commands_and_observations_are_whole_words() -> None:
    for command in (*COMMANDS, SUBMIT):
        ids = encode(fenced(command.format(source="plum", target="seal")))
        assert len(ids) == 2 + len(command.split())
        assert UNKNOWN_ID not in ids
    for index in range(200):
        for task in (train_task(index, index), heldout_task(index, index)):
            for text in (task.prompt, *task.files.values()):
                ids = encode(text)
                assert UNKNOWN_ID not in ids
                assert len(ids) == len(text.split()) + text.count("\n")
    rng = random.Random(0)
    for _ in range(200):
        for turn in demonstrate(rng).turns:
            assert UNKNOWN_ID not in encode(turn.answer + (turn.observation or ""))
    assert UNKNOWN_ID not in encode(observation(False) + "no command")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_any_text_encodes_and_what_is_known_of_it_comes_back(text: str) -> None:
    ids = encode(text)
    assert all(0 <= token < VOCABULARY_TOKENS for token in ids)
    if UNKNOWN_ID not in ids:
        assert decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(min_value=0, max_value=VOCABULARY_TOKENS - 1), max_size=40))
def test_decoding_is_the_tokens_one_after_the_other(ids: list[int]) -> None:
    assert decode(ids) == "".join(TOKENIZER.id_to_token(token) for token in ids)
