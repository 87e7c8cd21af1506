"""What `gyrectl run` reads: a job's journals, and its tokenizer where there is one to be had.

Journals are read as they lie on disk, open or closed, and never written to; the job may be running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.cli.client import books, read_spec
from gyre.cli.report import Books
from gyre.cli.run_fates import Fates
from gyre.errors import BadInput, GyreError
from gyre.jobdir import JobDir
from gyre.proxy.held_copies import HeldCopies
from gyre.proxy.journal_writer import Found, look_at_journal
from gyre.proxy.journals import JournalPlace, find_journal, journals, segments
from gyre.trajectory.replay import Replay, replay


@dataclass(frozen=True)
class RunFile:
    """One journal, read."""

    place: JournalPlace
    damage: str
    """What of it could not be read, in words; empty: nothing. A run that writes at this moment may look so too."""
    run: Replay


class RunFiles:
    """The journals of one job on this node, and the copies of others' that it has."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self.unreadable: list[str] = []
        """What had to be left out, and why, a line each."""
        self.damaged: list[str] = []
        """Which journals were read in part, a line each."""

    @property
    def j_max(self) -> int:
        return read_spec(self._job).batch.j_max

    def one(self, run: str, attempt: int | None) -> RunFile:
        """The run's last attempt, or the one that is named. Raises BadInput."""
        return self._read(find_journal(self._places(), run, attempt))

    def some(self, runs: Sequence[str], attempt: int | None) -> Iterator[RunFile]:
        """The named runs, or every journal of the job that can be read."""
        if runs:
            yield from [self.one(run, attempt) for run in runs]
            return
        for place in self._places():
            try:
                yield self._read_or_closed(place)
            except BadInput as error:  # no file to read, torn in its first record, or of another time's format
                self.unreadable.append(f"attempt {place.attempt}: {error}")

    def _places(self) -> list[JournalPlace]:
        """Every journal of this node's, and the copies of others' that it has; by run and attempt."""
        own = journals(self._job.journal)
        known = {(place.run, place.attempt) for place in own}
        copies = [each for each in HeldCopies(self._job.copies).places() if (each.run, each.attempt) not in known]
        return sorted([*own, *copies], key=lambda place: (place.run, place.attempt))

    def _read_or_closed(self, place: JournalPlace) -> RunFile:
        try:
            return self._read(place)
        except FileNotFoundError:  # it was closed and put away a moment ago
            return self.one(place.run, place.attempt)

    def _read(self, place: JournalPlace) -> RunFile:
        name, damage = f"journal of run {place.run}", ""
        try:
            found = look_at_journal(place.folder)
            damage = _damage(place, found)
            file = RunFile(place, damage, replay(found.records))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise BadInput(name, str(error.filename), f"a file that can be read ({error.strerror})") from error
        except BadInput as error:
            raise BadInput(name, error.value, "; ".join(filter(None, (error.allowed, damage)))) from error
        if damage:
            self.damaged.append(f"run {place.run}, attempt {place.attempt}: {damage}")
        return file

    def fates(self) -> Fates:
        """What became of the runs, by the job's records. Where these cannot be read, `unreadable` says so."""
        found = self.books("what was trained")
        return Fates(None, None) if found is None else Fates(found, read_spec(self._job))

    def books(self, whereof: str) -> Books | None:
        """The job's records. Where these cannot be read, `unreadable` says what is not told for it."""
        try:
            return asyncio.run(books(self._job))
        except GyreError as error:
            self.unreadable.append(f"{whereof} is not told: {error}")
            return None

    def words(self) -> Words | None:
        """The job's tokenizer, or None where it cannot be read."""
        from gyre.actors.node_config import NodeConfig
        from gyre.demo.builtin import model_dir

        try:
            base = NodeConfig.load(self._job.node_file).base
            return Words(model_dir(read_spec(self._job).model.path, base) / "tokenizer.json")
        except (GyreError, OSError, ImportError):
            return None


class Words:
    """Token ids as text. Raises BadInput for a file that is no tokenizer."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise BadInput("tokenizer", str(path), f"a readable tokenizer.json is needed ({error})") from error

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


def _damage(place: JournalPlace, found: Found) -> str:
    if found.torn is None:
        return ""
    unread = [path for path in segments(place.folder) if path >= found.torn]
    unread_bytes = sum(path.stat().st_size for path in unread) - found.good_bytes
    return f"damaged: {unread_bytes} bytes from byte {found.good_bytes} of {found.torn.name} on are not read"
