"""What the fuzzer tries is what the gateway does: a right body has an answer, a wrong one a fault, and a fault of ours raises."""

from __future__ import annotations

import json

import pytest
from proxy.model_folder import write_model_folder
from proxy.mutations import BODIES

from gyre.proxy.faults import FaultKind
from gyre.proxy.rendering import Rendering

from .exchange import PATHS, SAID, Exchange, strict_json


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    return Rendering(write_model_folder(tmp_path_factory.mktemp("model")), thinking=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"<think>\nhm\n</think>\n\nYes.",
        b'<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
        b"The END of it",
        b"half a letter \xf0\x9f",
        b"long " * 100,
    ],
)
def test_a_right_body_has_an_answer_whatever_is_said(path: str, said: bytes, rendering: Rendering) -> None:
    data = json.dumps(BODIES[path]).encode() + SAID + said
    assert Exchange(path, rendering).attempt(data) is None


def test_a_thought_alone_at_the_end_of_a_request_is_the_answers_when_it_comes_back(rendering: Rendering) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    body = dict(BODIES["responses"])
    body["input"] = [{"role": "user", "content": "Do."}, thought]
    assert Exchange("responses", rendering).attempt(json.dumps(body).encode() + SAID + b"Done.") is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"messages": "\xff"}', b'{"model": NaN}'])
def test_a_wrong_body_is_refused(path: str, data: bytes, rendering: Rendering) -> None:
    fault = Exchange(path, rendering).attempt(data)
    assert fault is not None
    assert fault.kind is FaultKind.BAD_REQUEST


def test_a_prompt_that_does_not_fit_is_refused_as_too_long(rendering: Rendering) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 5_000}]}
    fault = Exchange(PATHS[0], rendering).attempt(json.dumps(body).encode())
    assert fault is not None
    assert fault.kind is FaultKind.TOO_LONG


@pytest.mark.parametrize("path", PATHS)
def test_an_error_that_is_no_fault_is_raised(path: str, rendering: Rendering, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange(path, rendering)
    monkeypatch.setattr(rendering, "parse", lambda output, prompt: None)
    with pytest.raises(AttributeError):
        exchange.attempt(json.dumps(BODIES[path]).encode())


@pytest.mark.parametrize("data", [b'{"a": NaN}', b'{"a": 1, "a": 2}'])
def test_answers_are_read_strictly(data: bytes) -> None:
    with pytest.raises(AssertionError):
        strict_json(data)
