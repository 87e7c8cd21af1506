"""What passes between a session and the sampling of its calls, as records."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from gyre.ids import CellId
from gyre.proxy.conversation import Finish


@dataclass(frozen=True)
class Sampling:
    """How a call samples. `temperature` is the run's, whatever the harness asks: training needs the log-probs of the
    distribution that was sampled from."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    seed: int | None


@dataclass(frozen=True)
class Cached:
    """Where the first `tokens` of a prompt were computed last, under which weights."""

    cell: CellId
    version: int
    tokens: int


@dataclass(frozen=True)
class Stretch:
    """The tokens that one engine added."""

    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]


@dataclass(frozen=True)
class Ending:
    """How a call's sampling ended, and what it went through on the way."""

    finish: Finish
    stop_sequence: str
    cached: Cached | None
    cached_tokens: int
    """Of the prompt, on the first engine."""
    continued: bool
    recomputed_tokens: int
    max_silence_s: float
