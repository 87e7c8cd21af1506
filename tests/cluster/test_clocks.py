"""The wall clock of the node that leads and has the core jumps by an hour, forth and back: nothing depends on it.

A library of our own is preloaded (wall_clock.c): no machine's clock is set. What it shifts is what the node's processes read.
"""

from __future__ import annotations

import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.store.records import NodeRecord, RunRecord, RunState

from .etcd_server import PlainEtcd
from .fleet import Fleet

HOUR_S = 3600

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="wall_clock.c needs a C compiler (cc)")


class WallClock:
    def __init__(self, folder: Path) -> None:
        self._library, self._file = folder / "wall_clock.so", folder / "off"
        source = Path(__file__).with_name("wall_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self._library, source], check=True)
        self.jump_to(0)

    def jump_to(self, off_s: int) -> None:
        """In place, at once: whoever reads the clock has it mapped."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", off_s))

    @property
    def before(self) -> tuple[str, ...]:
        """What a command is started through, to go by this clock."""
        return ("env", f"LD_PRELOAD={self._library}", f"GYRE_TEST_CLOCK={self._file}")

    def off_s(self) -> int:
        """As a process reads it that goes by this clock."""
        seen = subprocess.run([*self.before, "date", "+%s"], check=True, capture_output=True, text=True).stdout
        right = subprocess.run(["date", "+%s"], check=True, capture_output=True, text=True).stdout
        return int(seen) - int(right)


@pytest.fixture
def fleet(tmp_path: Path, plain_etcd: PlainEtcd) -> Iterator[Fleet]:
    made = Fleet.make(tmp_path / "fleet", plain_etcd.url, "ab")
    yield made
    left = made.processes()
    made.kill_all()
    assert not left, left


def waiting(fleet: Fleet, runs: list[RunRecord]) -> int:
    living = fleet.harnesses("t*")
    left = [run for run in runs if run.state is not RunState.SETTLED]
    return len(left) if all(f"{run.run}/{run.attempt}" in living for run in left) else -1


async def test_the_clock_of_the_leaders_node_jumps_by_an_hour_forth_and_back(fleet: Fleet, tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    one, other = fleet.nodes["a"], fleet.nodes["b"]
    one.before = clock.before
    one.start()
    fleet.submit()
    assert (await fleet.leader(), (await fleet.core()).node) == ("a", "a")
    other.start()
    await fleet.until_record("node b", fleet.keys.node("b"), NodeRecord, lambda _: True)
    for step, off_s in ((1, HOUR_S), (2, -HOUR_S)):
        at_gate = (2 + 6 * step, 3)
        await fleet.until_runs(
            "runs at their gate", lambda runs, wanted=at_gate: (len(runs), waiting(fleet, runs)) == wanted
        )
        clock.jump_to(off_s)
        assert abs(clock.off_s() - off_s) <= 2
        other.signal(signal.SIGKILL)
        other.start()  # so that the nodes connect anew, and each looks at the other's certificate
        fleet.open_gate("t*")
        await fleet.until_record_of_steps(step)
    await fleet.finished()
    await fleet.check_books(2)
    fleet.stop()
