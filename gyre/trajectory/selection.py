"""Which lineages of a run are trained (DESIGN §6): at most J_max, by role, then most sampled tokens, then oldest.

The tree describes its lineages as views; `choose` orders and caps them. The tree then lets each sampled token count
in the first chosen lineage that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gyre.errors import BadInput
from gyre.ids import CallId
from gyre.trajectory.records import Lineage, LineageInfo, LineageRole

_RANK = {role: rank for rank, role in enumerate(LineageRole)}


@dataclass(frozen=True)
class LineageView:
    """One lineage as the tree sees it, without its tokens."""

    leaf: CallId
    """Its last call whose answer reached the harness."""
    order: int
    """The leaf's place among the run's calls."""
    role: LineageRole
    """The leaf's."""
    calls: tuple[CallId, ...]
    """The calls on it, first to last, that reached the harness."""
    tokens: int
    sampled_tokens: int
    """Tokens of it that training may count: sampled, delivered, not auxiliary."""


def choose(views: Iterable[LineageView], j_max: int) -> tuple[LineageView, ...]:
    """The views to train, in the order in which shared tokens are counted.

    Auxiliary lineages are never chosen, nor are those in which nothing could be counted.
    """
    if j_max < 1:
        raise BadInput("j_max", j_max, "at least 1")
    trainable = (view for view in views if view.role is not LineageRole.AUXILIARY and view.sampled_tokens > 0)
    return tuple(sorted(trainable, key=lambda view: (_RANK[view.role], -view.sampled_tokens, view.order))[:j_max])


def describe(lineage: Lineage) -> LineageInfo:
    """The size of a selected lineage, for the books and the packer."""
    _, counted, _, versions = lineage.arrays()
    counted_versions = [version for version, flag in zip(versions, counted, strict=True) if flag]
    return LineageInfo(
        index=lineage.index,
        role=lineage.role,
        tokens=len(counted),
        counted_tokens=len(counted_versions),
        lowest_version=min(counted_versions, default=-1),
    )
