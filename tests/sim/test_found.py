"""Faults that once broke an invariant, as short as they can be: a seed and its list, named by what was wrong."""

from __future__ import annotations

from .faults import Fault, Kind
from .world import simulate


def settles(seed: int, *events: Fault) -> None:
    report = simulate(seed, events)
    assert not report.violation, report


def test_a_cell_that_hears_late_that_its_replica_holds_nothing_after_a_step_that_failed() -> None:
    """It waits for the store meanwhile, and its claims went on until five of them had failed the job."""
    settles(
        405912,
        Fault(0.13, Kind.FAIL, "step c0"),
        Fault(4.18, Kind.PAUSE, "n0", 10.16),
        Fault(16.39, Kind.CUT_AT_WRITE, "n0 switches", 6.47, 1.0),
    )


def test_a_node_that_waits_for_the_first_snapshot_while_the_stores_history_is_compacted() -> None:
    """Its gyred ended, for its watch was told that what it asked for was compacted away."""
    settles(377, Fault(0.61, Kind.COMPACT, "store", 5.0))


def test_a_gyred_under_the_name_of_a_node_that_has_the_core() -> None:
    """It had not joined, and began a core actor all the same."""
    settles(78, Fault(3.19, Kind.TWIN, "n0", 17.27))


def test_a_gateway_that_a_cells_node_does_not_see_when_it_drains() -> None:
    """All had lost their leases, and one joined again sooner than another heard of it. The engine, which has released its
    memory, says no to its request, and the call goes on elsewhere."""
    settles(
        146,
        Fault(5.93, Kind.KILL, "n0 harness"),
        Fault(6.02, Kind.STORE_AWAY, "store", 14.45),
        Fault(6.04, Kind.STORE_FULL, "store", 13.72),
    )
