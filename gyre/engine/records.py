"""What goes to an engine and what comes back, as the client's callers see it; and the reading of SGLang's JSON.

The gateway makes a `GenerateRequest`; the client turns the engine's stream into `Chunk`s that hold only new tokens,
whether the engine streams cumulatively (SGLang's default) or incrementally.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from gyre.errors import GyreError, Unavailable

FinishKind = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "retract", "in_place"]


class EngineGone(Unavailable):
    """The engine cannot be reached, or was lost in the middle of an answer. What it sent so far is valid."""


class EngineUnreached(EngineGone):
    """No connection to the engine could be made, so what it was to be asked it has not been asked."""


class EngineAbsent(EngineUnreached):
    """Nothing listens where the engine was: its process has ended."""


class EngineRefused(GyreError):
    """The engine answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the engine answered {status}: {text}")
        self.status = status
        self.text = text


@dataclass(frozen=True)
class IdText:
    """Token ids as JSON text, a comma behind each: of a long prompt that is kept, and not made anew.

    Its pieces grow shorter towards the end, by half and more. So what is added copies little of what is there, and a
    text of megabytes has a dozen.
    """

    pieces: tuple[bytes, ...] = ()

    def grown(self, ids: Sequence[int]) -> IdText:
        """The text with `ids` behind it."""
        if not ids:
            return self
        pieces, last = list(self.pieces), orjson.dumps(list(ids))[1:-1] + b","
        while pieces and len(pieces[-1]) < 2 * len(last):
            last = pieces.pop() + last
        return IdText((*pieces, last))


@dataclass(frozen=True)
class GenerateRequest:
    """One sampling request. `rid` is new for every attempt; `version` is the weights' version and keys the KV cache.

    Temperature 0 is greedy. `seed` fixes the sampling noise of every position: an engine that honours it samples the
    same tokens again, also when the request is continued elsewhere as prompt + tokens so far.
    """

    rid: str
    input_ids: Sequence[int] | IdText
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    version: int | None = None
    stream_interval: int = 1
    """Tokens that may gather before the engine sends them. The first and the last ones do not wait for more."""

    def body(self, *, stream: bool) -> tuple[bytes, ...]:
        """The JSON body of SGLang's /generate, in pieces."""
        ids = self.input_ids if isinstance(self.input_ids, IdText) else IdText().grown(self.input_ids)
        *first, last = ids.pieces or (b"",)
        return b'{"input_ids":[', *first, last[:-1], b"],", orjson.dumps(self._rest(stream=stream))[1:]

    def _rest(self, *, stream: bool) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            # Of those without one a deterministic SGLang would sample all with the same noise.
            "sampling_seed": secrets.randbits(63) if self.seed is None else self.seed,
        }
        if self.stream_interval > 1:
            sampling["stream_interval"] = self.stream_interval
        body: dict[str, Any] = {
            "rid": self.rid,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": stream,
        }
        if self.version is not None:
            body["extra_key"] = str(self.version)
        return body


@dataclass(frozen=True)
class Finish:
    """Why the engine stopped. `matched` is the stop token (or string) when kind is `stop`; `abort` keeps its tokens."""

    kind: FinishKind
    matched: int | str | None = None
    message: str = ""


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens `start` to `end` (exclusive) were sampled by the weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Tokens that were not in an earlier chunk. The last chunk has `finish`, and only it has `version_spans`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token in the softmax of logits / temperature (at temperature 0: of the plain logits),
    before top-p and top-k, as SGLang gives it."""
    version: int
    """The weights' version the engine reported with these tokens; -1 when it is no number."""
    finish: Finish | None
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the engine did not compute."""
    version_spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True)
class EngineInfo:
    version: int
    model_path: str
    kv_address: str
    """Where peers pull KV blocks from; empty when this engine serves none."""
    kv_layout: str
    """Equal between engines whose blocks have the same meaning and shape."""
    block_tokens: int
    kv_epoch: int = 0
    """The source's, for the manifests of those who pull from it."""
    kv_model: str = ""
    """Names the weights that its blocks are of."""
    kv_carrier: str = ""
    """Which transport it uses, and why that one."""


@dataclass(frozen=True)
class Loads:
    running: int
    waiting: int


@dataclass(frozen=True)
class KvLack:
    """The blocks that an engine lacks of a prefix, in the prefix's order."""

    version: int
    layout: str
    blocks: int
    """Whole blocks of the prefix."""
    missing: tuple[bytes, ...]


@dataclass(frozen=True)
class KvPulled:
    """What an engine took over from a peer. Nothing is committed when `reason` is not empty."""

    blocks: int
    bytes: int
    damaged: int
    """Blocks that did not arrive as they were sent, and are left out."""
    seconds: float
    reason: str


def read_version(text: object) -> int:
    """SGLang's `weight_version` is a free string; Gyre's is the decimal version."""
    return int(text) if isinstance(text, str) and text.isdecimal() else -1


class StreamReader:
    """Turns the messages of one /generate stream into chunks of new tokens."""

    def __init__(self) -> None:
        self._seen_tokens = 0

    def read(self, message: Mapping[str, Any]) -> Chunk:
        """The chunk in one message. Raises EngineRefused when the engine reports an error in the stream."""
        error = message.get("error")
        if error is not None:
            said = cast("Mapping[str, Any]", error) if isinstance(error, Mapping) else {}
            code = said.get("code")
            raise EngineRefused(code if isinstance(code, int) else 200, str(said.get("message", error)))
        try:
            meta = cast("Mapping[str, Any]", message["meta_info"])
            output_ids = cast("list[int]", message.get("output_ids") or [])
            entries = cast("list[list[Any]]", meta.get("output_token_logprobs") or [])
            total = int(meta["completion_tokens"])
            new = total - self._seen_tokens
            if new < 0 or len(output_ids) < new or len(entries) < new:
                raise EngineGone(
                    f"the engine's stream lost tokens: {total} made, {len(output_ids)} ids, {len(entries)} log-probs"
                )
            # The newest tokens are at the end, whether the message repeats the older ones or not.
            token_ids = tuple(output_ids[len(output_ids) - new :])
            logprobs = tuple(float(entry[0]) for entry in entries[len(entries) - new :])
            self._seen_tokens = total
            return Chunk(
                token_ids=token_ids,
                logprobs=logprobs,
                version=read_version(meta.get("weight_version")),
                finish=_read_finish(meta.get("finish_reason")),
                prompt_tokens=int(meta.get("prompt_tokens", 0)),
                cached_tokens=int(meta.get("cached_tokens", 0)),
                version_spans=tuple(
                    VersionSpan(read_version(span["version"]), int(span["start"]), int(span["end"]))
                    for span in cast("list[Mapping[str, Any]]", meta.get("weight_versions") or [])
                ),
            )
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineGone(f"the engine's stream has an unknown shape: {str(message)[:200]}") from error


def _read_finish(reason: Mapping[str, Any] | None) -> Finish | None:
    if reason is None:
        return None
    kind = reason["type"]
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason.type: {kind!r}")
    return Finish(kind, reason.get("matched"), str(reason.get("message") or ""))
