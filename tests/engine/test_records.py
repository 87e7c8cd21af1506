"""Reading an engine's stream: the same chunks, however the engine repeats itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.engine.records import EngineGone, EngineRefused, Finish, GenerateRequest, IdText, StreamReader, VersionSpan

pieces = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6)


def message(token_ids: list[int], total: int, finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": token_ids,
        "meta_info": {
            "completion_tokens": total,
            "prompt_tokens": 7,
            "cached_tokens": 0,
            "weight_version": "4",
            "finish_reason": finish,
            "output_token_logprobs": [[-0.5 * token, token, None] for token in token_ids],
        }
        | meta,
    }


def read_all(messages: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    reader = StreamReader()
    chunks = [reader.read(item) for item in messages]
    for chunk in chunks:
        assert chunk.logprobs == tuple(-0.5 * token for token in chunk.token_ids)
    return [chunk.token_ids for chunk in chunks]


@given(pieces)
def test_cumulative_and_incremental_streams_read_the_same(parts: list[list[int]]) -> None:
    ends = [sum(len(part) for part in parts[: index + 1]) for index in range(len(parts))]
    everything = [token for part in parts for token in part]
    incremental = [message(part, end) for part, end in zip(parts, ends, strict=True)]
    cumulative = [message(everything[:end], end) for end in ends]
    assert read_all(incremental) == read_all(cumulative) == [tuple(part) for part in parts]


def test_a_stream_that_lost_tokens_is_not_believed() -> None:
    reader = StreamReader()
    reader.read(message([1], 1))
    with pytest.raises(EngineGone, match="lost tokens"):
        reader.read(message([3], 3))


def test_an_error_inside_a_stream_is_a_refusal() -> None:
    with pytest.raises(EngineRefused, match="out of memory"):
        StreamReader().read({"error": {"message": "out of memory"}})


@pytest.mark.parametrize(
    "broken", [{}, {"meta_info": {}}, {"meta_info": None}, {"meta_info": {"completion_tokens": "x"}}]
)
def test_a_message_of_another_shape_is_a_lost_engine(broken: dict[str, Any]) -> None:
    with pytest.raises(EngineGone):
        StreamReader().read(broken)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ({"type": "stop", "matched": 2}, Finish("stop", 2)),
        ({"type": "length", "length": 8}, Finish("length")),
        (
            {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
            Finish("abort", None, "Aborted"),
        ),
    ],
)
def test_each_kind_of_finish_is_read(reason: dict[str, Any], finish: Finish) -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    chunk = StreamReader().read(message([1, 2], 2, reason, weight_versions=spans))
    assert chunk.finish == finish
    assert chunk.version == 4
    assert chunk.version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))


def test_a_version_that_is_no_number_is_minus_one() -> None:
    assert StreamReader().read(message([1], 1, weight_version="default")).version == -1


def test_the_version_of_a_request_keys_the_cache() -> None:
    body = json.loads(b"".join(GenerateRequest("r", [1, 2], 5, version=12, seed=9).body(stream=True)))
    assert body["extra_key"] == "12"
    assert body["sampling_params"]["sampling_seed"] == 9
    assert b"extra_key" not in b"".join(GenerateRequest("r", [1, 2], 5).body(stream=True))
    kept = GenerateRequest("r", IdText((b"1,", b"2,")), 5, version=12, seed=9)
    assert json.loads(b"".join(kept.body(stream=True))) == body
