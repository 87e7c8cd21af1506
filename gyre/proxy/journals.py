"""Where a gateway keeps its runs' journals: one folder an attempt, among the open ones or the closed ones.

<journal>/open/<run>/<attempt>/000000.journal
<journal>/closed/<run>.<attempt>/000000.journal
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import BadInput
from gyre.ids import NodeId, RunId
from gyre.sched.placement import NOWHERE

_SUFFIX = ".journal"
_ATTEMPT = re.compile(r"0|[1-9][0-9]{0,17}")
"""As it is written in a folder's name; a folder of any other name is none of ours."""


@dataclass(frozen=True)
class JournalPlace:
    run: RunId
    attempt: int
    open: bool
    folder: Path
    copy_of: NodeId = NOWHERE
    """The node whose journal it is a copy of; none for one's own."""


def open_folder(root: Path, run: RunId, attempt: int) -> Path:
    return root / "open" / run / f"{attempt}"


def closed_folder(root: Path, run: RunId, attempt: int) -> Path:
    return root / "closed" / f"{run}.{attempt}"


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:06d}{_SUFFIX}"


def segments(folder: Path) -> list[Path]:
    """The segments of one journal, in order."""
    return sorted(folder.glob(f"*{_SUFFIX}"))


def journals(root: Path) -> list[JournalPlace]:
    """Every journal under `root`, by run and attempt. A run that closes meanwhile is found once, or in both places."""
    places = {(place.run, place.attempt): place for place in (*closed_journals(root), *open_journals(root))}
    return [places[key] for key in sorted(places)]


def find_journal(places: Sequence[JournalPlace], run: str, attempt: int | None) -> JournalPlace:
    """The journal of a run's attempt, or of its last one. Raises BadInput where there is none."""
    found = [place for place in places if place.run == run and attempt in (None, place.attempt)]
    if not found:
        named = run if attempt is None else f"{run}, attempt {attempt}"
        raise BadInput("run", named, "a run with a journal on this node; `gyrectl run list` names them")
    return found[-1]


def open_journals(root: Path) -> list[JournalPlace]:
    """Those of the runs that are open, by run and attempt."""
    places = [
        JournalPlace(RunId(folder.parent.name), int(folder.name), True, folder)
        for folder in (root / "open").glob("*/*")
        if _ATTEMPT.fullmatch(folder.name)
    ]
    return sorted(places, key=lambda place: (place.run, place.attempt))


def closed_journals(root: Path) -> list[JournalPlace]:
    """Those of the runs that are closed, by run and attempt."""
    places = [
        JournalPlace(RunId(run), int(attempt), False, folder)
        for folder in (root / "closed").glob("*")
        for run, _, attempt in [folder.name.rpartition(".")]
        if run and _ATTEMPT.fullmatch(attempt)
    ]
    return sorted(places, key=lambda place: (place.run, place.attempt))
