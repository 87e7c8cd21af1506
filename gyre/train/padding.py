# pyright: basic
"""Lineages as padded rows: what one forward of the replica takes.

Lineages of similar length share a forward, so little of it is padding. Padding stands at the end, where causal
attention keeps it out of everything before, and is never counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre.actors.messages_replica import LineageWork, MicroStep
from gyre.errors import BadInput
from gyre.loss.weights import run_weight
from gyre.trajectory.records import Lineage


@dataclass(frozen=True)
class Rows:
    """B lineages, T tokens the longest. Entry t of the target arrays is about token t + 1, predicted from token t."""

    token_ids: Tensor
    """int64 [B, T]"""
    behaviour: Tensor
    """float32 [B, T - 1]: the log-prob under which the token was sampled."""
    counted: Tensor
    """bool [B, T - 1]"""
    advantages: Tensor
    """float32 [B]"""
    weights: Tensor
    """float32 [B]: 1 / T_i of each row's run."""


@dataclass(frozen=True)
class _Row:
    work: LineageWork
    token_ids: np.ndarray
    counted: np.ndarray
    behaviour: np.ndarray


def padded_rows(
    work: MicroStep, lineages: Sequence[Lineage], vocab_size: int, context_tokens: int, limit_tokens: int
) -> Iterator[Rows]:
    """The lineages of `work` in forwards of at most `limit_tokens`, padding included (a longer one stands alone).

    All of them are checked before the first is given. Raises BadInput.
    """
    given = {(lineage.run, lineage.attempt, lineage.index): lineage for lineage in lineages}
    rows: list[_Row] = []
    for item in work.lineages:
        lineage = given.get((item.run, item.attempt, item.index))
        if lineage is None:
            name = f"{item.run}/{item.attempt}/{item.index}"
            raise BadInput("lineages", name, f"every lineage of {work.micro_step} has to be given")
        rows.append(_checked(item, lineage, vocab_size, context_tokens))
    rows.sort(key=lambda row: -len(row.token_ids))
    return _fill(rows, limit_tokens)


def _fill(rows: Sequence[_Row], limit_tokens: int) -> Iterator[Rows]:
    start = 0
    while start < len(rows):
        count = max(1, limit_tokens // len(rows[start].token_ids))
        yield _pad(rows[start : start + count])
        start += count


def _pad(rows: Sequence[_Row]) -> Rows:
    longest = len(rows[0].token_ids)
    token_ids = np.zeros((len(rows), longest), np.int64)
    behaviour = np.zeros((len(rows), longest - 1), np.float32)
    counted = np.zeros((len(rows), longest - 1), np.bool_)
    for place, row in enumerate(rows):
        tokens = len(row.token_ids)
        token_ids[place, :tokens] = row.token_ids
        behaviour[place, : tokens - 1] = row.behaviour[1:]
        counted[place, : tokens - 1] = row.counted[1:]
    return Rows(
        token_ids=torch.from_numpy(token_ids),
        behaviour=torch.from_numpy(behaviour),
        counted=torch.from_numpy(counted),
        advantages=torch.tensor([row.work.advantage for row in rows], dtype=torch.float32),
        weights=torch.tensor([run_weight(row.work.run_counted_tokens) for row in rows], dtype=torch.float32),
    )


def _checked(work: LineageWork, lineage: Lineage, vocab_size: int, context_tokens: int) -> _Row:
    name = f"lineage {work.run}/{work.attempt}/{work.index}"
    token_ids = np.frombuffer(lineage.token_ids, "<i4")
    counted = np.frombuffer(lineage.counted, np.uint8) != 0
    behaviour = np.frombuffer(lineage.logprobs, "<f4")
    tokens, counted_tokens = len(token_ids), int(counted.sum())
    if not (len(counted) == len(behaviour) == tokens):
        sizes = (tokens, len(counted), len(behaviour))
        raise BadInput(f"{name} array lengths", sizes, "one entry a token is expected in each")
    if not 2 <= tokens <= context_tokens:
        raise BadInput(f"{name} tokens", tokens, f"2 to {context_tokens} are expected")
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        allowed = f"token ids from 0 to {vocab_size - 1} are expected"
        raise BadInput(f"{name} token ids", (int(token_ids.min()), int(token_ids.max())), allowed)
    if counted[0]:
        raise BadInput(f"{name} counted[0]", True, "the first token has nothing before it that could have sampled it")
    if not 1 <= counted_tokens <= work.run_counted_tokens:
        allowed = f"1 to its run's {work.run_counted_tokens} are expected"
        raise BadInput(f"{name} counted tokens", counted_tokens, allowed)
    if not np.isfinite(behaviour[counted]).all():
        raise BadInput(f"{name} logprobs", float(behaviour[counted].min()), "finite numbers are expected")
    return _Row(work, token_ids, counted, behaviour)
