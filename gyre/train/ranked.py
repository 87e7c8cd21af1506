# pyright: basic
"""A replica of several ranks (tensor parallel), called as one of one rank is.

    replica = RankedReplica(model_dir, config, checkpoints_dir, staging_dir, ranks=2)
    replica.load(path, 0)  # on both ranks; what one of them cannot do, none has done
    replica.close()

Each rank is a Replica of its own. The first lives in this process; the others are child processes (rank_process), which get
every call over a pipe and do it at the same time. What a call gives is what it gives on the first rank; what it raises,
all raise (gyre.train.ranks). Where they do not come to the same end, because one has died, hangs or failed by itself,
there is no replica any more and this process ends at once, unanswered: whoever started it starts it anew. The other ranks
end when the pipe closes, however this process has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from gyre.actors.messages_replica import MicroStep, MicroStepDone, OptimizerStep, StageSums, StepDone, SumsShipped
from gyre.children import ExitStatus
from gyre.train.ranks import RankPlace
from gyre.train.replica import Replica, ReplicaConfig
from gyre.train.shape import read_shape, require_shares
from gyre.train.sums import Sums
from gyre.trajectory.records import Lineage

log = logging.getLogger("gyre.train.ranked")

T = TypeVar("T")
P = ParamSpec("P")
Outcome = tuple[str, str] | None
"""Of a call on one rank: None, or the error's type and what it says."""

SAME_END_S = 30.0
"""For all ranks to fail when one has. Who waits in a collective for one that is not in it any more waits for ever."""
_END_S = 10.0


class _Other:
    """Another rank's process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe()
        # The whole session is told to end, and the first rank may have something to bring to disk first.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gyre.train.rank_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()

    def tell(self, call: tuple[Callable[..., Any], Sequence[Any]] | None) -> None:
        with suppress(OSError):  # it is gone, as who listens to it finds too
            self.pipe.send(call)


class RankedReplica:
    """The replica of the model in `model_dir`, shared out among `ranks`; they have the GPUs from `first_device` on.

    As of a Replica, one thread at a time calls it, but for `end_checkpoints`. Raises BadInput for a model that cannot be
    shared out so.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ReplicaConfig,
        checkpoints_dir: Path,
        staging_dir: Path | None,
        ranks: int,
        first_device: int = 0,
    ) -> None:
        require_shares(read_shape(model_dir), ranks)
        # A file that goes with this process and that nobody else's can open.
        meeting = f"/proc/{os.getpid()}/fd/{os.memfd_create('ranks')}"
        first, *others = (RankPlace(rank, ranks, meeting, first_device + rank) for rank in range(ranks))
        self._closing = False
        self._ended_here = threading.Event()
        """The call that is being made has ended on the first rank."""
        self._others = [_Other(place.rank) for place in others]
        for other in self._others:
            threading.Thread(target=self._listen, args=(other,), name=f"rank-{other.rank}", daemon=True).start()

        def make() -> Replica:
            return Replica(model_dir, config, checkpoints_dir, staging_dir, first)

        of_others = [(Replica, (model_dir, config, checkpoints_dir, None, place)) for place in others]
        self._replica = self._at_once(make, of_others)

    def load(self, path: Path, version: int) -> str:
        return self._on_all(Replica.load, path, version)

    def offload(self) -> None:
        self._on_all(Replica.offload)

    def run_micro_step(self, work: MicroStep, lineages: Sequence[Lineage]) -> MicroStepDone:
        return self._on_all(Replica.run_micro_step, work, lineages)

    def sums(self, transfer: str) -> Sums:
        return self._on_all(Replica.sums, transfer)

    def keep(self, transfer: str) -> SumsShipped:
        return self._on_all(Replica.keep, transfer)

    def zero_sums(self) -> None:
        self._on_all(Replica.zero_sums)

    def require_fitting(self, sums: StageSums) -> None:
        self._replica.require_fitting(sums)

    def stage(self, sums: StageSums, values: Tensor) -> None:
        others = [(Replica.stage, (sums, None))] * len(self._others)
        self._at_once(lambda: self._replica.stage(sums, values), others)

    def merge(self, transfer: str) -> None:
        self._on_all(Replica.merge, transfer)

    def drop(self) -> None:
        self._on_all(Replica.drop)

    def step(self, order: OptimizerStep) -> StepDone:
        return self._on_all(Replica.step, order)

    def end_checkpoints(self, within_s: float) -> bool:
        return self._replica.end_checkpoints(within_s)

    def close(self) -> None:
        """End the other ranks; it is of no use any more."""
        self._closing = True
        for other in self._others:
            other.tell(None)
        for other in self._others:
            other.process.wait(_END_S)
        torch.distributed.destroy_process_group()

    # ------------------------------------------------------------------------------------------ private

    def _on_all(self, method: Callable[Concatenate[Replica, P], T], *args: P.args, **_: P.kwargs) -> T:
        return self._at_once(lambda: method(self._replica, *args), [(method, args)] * len(self._others))  # pyright: ignore[reportCallIssue] - there are no others

    def _at_once(self, here: Callable[[], T], others: Sequence[tuple[Callable[..., Any], Sequence[Any]]]) -> T:
        """Do it `here` and on the others; returns when it has ended on all."""
        self._ended_here.clear()
        for other, call in zip(self._others, others, strict=True):
            other.tell(call)
        try:
            result = here()
        except Exception as error:
            self._ended_here.set()
            self._require_same_end(outcome_of(error))
            raise
        self._ended_here.set()
        self._require_same_end(None)
        return result

    def _require_same_end(self, mine: Outcome) -> None:
        for other in self._others:
            try:
                theirs = other.outcomes.get(timeout=None if mine is None else SAME_END_S)
            except Empty:
                self._give_up(f"the first rank failed ({_shown(mine)}) and rank {other.rank} has not")
            if (mine or ("",))[0] != (theirs or ("",))[0]:
                self._give_up(f"the first rank {_shown(mine)}, rank {other.rank} {_shown(theirs)}")

    def _listen(self, other: _Other) -> None:
        try:
            while True:
                outcome: Outcome = other.pipe.recv()
                if outcome is not None and not self._ended_here.wait(SAME_END_S):
                    self._give_up(f"rank {other.rank} failed ({_shown(outcome)}) and the first has not")
                other.outcomes.put(outcome)
        except (EOFError, OSError):
            if not self._closing:
                code = other.process.wait(_END_S)
                status = ExitStatus(code) if code >= 0 else ExitStatus(signal=-code)
                self._give_up(f"rank {other.rank} (pid {other.process.pid}) ended: {status}")

    @staticmethod
    def _give_up(why: str) -> NoReturn:
        log.critical("%s; the replica ends with it", why)
        os._exit(1)


def outcome_of(error: Exception) -> Outcome:
    return type(error).__qualname__, str(error)


def _shown(outcome: Outcome) -> str:
    return "has done it" if outcome is None else f"{outcome[0]}: {outcome[1]}"
