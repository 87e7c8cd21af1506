"""A failed cell is tried again after growing pauses; a job without a working cell is given up, and no other."""

from __future__ import annotations

from gyre.ids import CellId
from gyre.sched.revival import FIRST_PAUSE_S, TRIES, WELL_S, Revival

A, B = CellId("c0"), CellId("c1")


def test_a_failed_cell_is_tried_after_a_pause_that_doubles() -> None:
    revival = Revival()
    tried = [s for s in range(60) if revival.due([A], float(s))]
    assert tried == [5, 15, 35]


def test_a_job_is_hopeless_when_every_cell_was_tried_in_vain() -> None:
    revival, now_s = Revival(), 0.0
    while not revival.hopeless([A, B], 2):
        revival.due([A, B], now_s)
        now_s += 1.0
    assert now_s >= FIRST_PAUSE_S * (2**TRIES - 1)
    assert not revival.hopeless([A], 2)  # the other one works
    assert not Revival().hopeless([A, B], 2)  # not tried yet


def test_a_cell_that_was_well_for_a_while_begins_anew() -> None:
    revival = Revival()
    for s in range(20):
        revival.due([A], float(s))
    assert revival.due([], 20.0 + WELL_S) == []
    assert revival.due([A], 200.0) == []
    assert revival.due([A], 200.0 + FIRST_PAUSE_S) == [A]
