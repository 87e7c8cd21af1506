"""What the local engine is asked and what it answers, as records; and the reading of the request's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from gyre.errors import BadInput


@dataclass(frozen=True)
class SampleRequest:
    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    seed: int | None
    extra_key: str | None
    stream: bool
    stream_interval: int
    """Tokens that gather before they are sent, but for the first and the last."""


@dataclass(frozen=True)
class FinishReason:
    kind: str
    matched: int | None = None
    length: int = 0
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        if self.kind == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.kind == "length":
            return {"type": "length", "length": self.length}
        return {"type": "abort", "message": self.message, "status_code": None, "err_type": None}


@dataclass(frozen=True)
class Output:
    """New tokens of one request, and how it stands."""

    rid: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    retractions: int
    finish: FinishReason | None
    spans: tuple[tuple[int, int, int], ...]
    """(version, start, end) over the output tokens; filled when finished."""


@dataclass(frozen=True)
class Load:
    running: int
    waiting: int


def merge(first: Output, second: Output) -> Output:
    """Two outputs of one request as one."""
    return Output(
        rid=second.rid,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        version=second.version,
        prompt_tokens=second.prompt_tokens,
        completion_tokens=second.completion_tokens,
        cached_tokens=second.cached_tokens,
        retractions=second.retractions,
        finish=second.finish,
        spans=second.spans,
    )


_SAMPLING = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_token_ids",
    "ignore_eos",
    "sampling_seed",
    "stream_interval",
}
_TOP = {"rid", "input_ids", "sampling_params", "return_logprob", "stream", "extra_key", "log_metrics"}


def read_request(body: Any, rid: str) -> SampleRequest:
    """The request in a /generate body; `rid` is taken when it names none. Raises BadInput, one line.

    What the engine cannot honour is refused, never ignored. A field that is null or false asks for nothing: sglang-router
    writes requests out with all the fields that it knows (and has them counted in SGLang's metrics).
    """
    top = _object("body", body)
    _known("body", top, _TOP)
    sampling = _object("sampling_params", top.get("sampling_params") or {})
    _known("sampling_params", sampling, _SAMPLING)
    return SampleRequest(
        rid=_string("rid", top.get("rid") or rid),
        input_ids=token_ids("input_ids", top.get("input_ids")),
        max_new_tokens=_whole("max_new_tokens", sampling.get("max_new_tokens", 128), 1),
        temperature=_number("temperature", sampling.get("temperature", 1.0), 0.0, 100.0),
        top_p=_number("top_p", sampling.get("top_p", 1.0), 1e-9, 1.0),
        top_k=_top_k(sampling.get("top_k", -1)),
        stop_token_ids=frozenset(_ids("stop_token_ids", sampling.get("stop_token_ids") or [])),
        ignore_eos=_flag("ignore_eos", sampling.get("ignore_eos", False)),
        seed=None if sampling.get("sampling_seed") is None else _whole("sampling_seed", sampling["sampling_seed"], 0),
        extra_key=None if top.get("extra_key") is None else _string("extra_key", top["extra_key"]),
        stream=_flag("stream", top.get("stream", False)),
        stream_interval=_whole("stream_interval", sampling.get("stream_interval", 1), 1),
    )


def token_ids(field: str, value: Any) -> tuple[int, ...]:
    found = _ids(field, value)
    if not found:
        raise BadInput(field, value, "at least one token id is needed")
    return found


def _ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(
        type(token) is not int or not 0 <= token < 2**31 for token in cast("list[Any]", value)
    ):
        raise BadInput(field, value, "a list of token ids is expected")
    return tuple(cast("list[int]", value))


def _object(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(field, value, "a JSON object is expected")
    return cast("dict[str, Any]", value)


def _known(field: str, value: Mapping[str, Any], allowed: set[str]) -> None:
    for key in value:
        if key not in allowed and value[key] not in (None, False):
            raise BadInput(f"{field}.{key}", value[key], f"the local engine honours {', '.join(sorted(allowed))}")


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > 256:
        raise BadInput(field, value, "a string of 1 to 256 characters is expected")
    return value


def _whole(field: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise BadInput(field, value, f"a whole number of at least {least} is expected")
    return value


def _number(field: str, value: Any, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise BadInput(field, value, f"a number from {least} to {most} is expected")
    return float(value)


def _top_k(value: Any) -> int:
    if value == -1:
        return -1
    return _whole("top_k", value, 1)


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadInput(field, value, "true or false is expected")
    return value
