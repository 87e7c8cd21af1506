"""What gyrectl makes of a duration, and what it says of a node that drains."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.cli.durations import seconds
from gyre.cli.tables import drain_line, node_rows, with_waiting
from gyre.errors import BadInput
from gyre.ids import CellId, GroupId, NodeId, RunId
from gyre.store.records import CellSpecRecord, NodeRecord, RunRecord, RunState, WaitingRecord

A, B = NodeId("a"), NodeId("b")


@pytest.mark.parametrize(("text", "right"), [("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("0s", 0.0)])
def test_a_duration_is_a_number_and_its_unit(text: str, right: float) -> None:
    assert seconds("--within", text) == right


@pytest.mark.parametrize("text", ["", "10", "m", "-1m", "10 m", "1d", "1e3s", "inf", "9999999h", "١m", "1m30s"])
def test_what_is_no_duration_is_named_with_what_is_one(text: str) -> None:
    with pytest.raises(BadInput, match=r"--within: .* a number and s, m or h, as in 90s, 10m or 1\.5h"):
        seconds("--within", text)


def rows(draining: dict[NodeId, float | None], *live: NodeId, there: tuple[NodeId, ...] = (A, B)) -> list[Any]:
    nodes = [NodeRecord(node, f"tls:{node}:1", "i", 2) for node in there]
    runs = [
        RunRecord(RunId(f"r{n}"), GroupId("g"), RunState.LIVE, 1, node, None, None, "", None, 0.0, 0.0)
        for n, node in enumerate(live)
    ]
    return node_rows(nodes, [CellSpecRecord(CellId("a-c0"), A, 2)], runs, draining, A, A)


def test_a_node_that_drains_shows_its_time_and_is_shown_while_it_is_away() -> None:
    found = {row["node"]: row for row in rows({A: 600.0, B: None}, there=(A,))}
    assert [(found[node]["there"], found[node]["draining"], found[node]["within_s"]) for node in (A, B)] == [
        (True, True, 600.0),
        (False, True, None),
    ]
    assert [(row["draining"], row["within_s"]) for row in rows({})] == [(False, None)] * 2


def test_what_a_drain_waits_for_is_said_until_nothing_is_live_or_queued_there() -> None:
    assert drain_line(rows({A: None}, A, B), "a") == "a: 1 live, 0 queued"
    assert drain_line(rows({A: None, B: None}, A), "a") == "a: 1 live, 0 queued; no other node takes runs"
    assert drain_line(rows({A: None}, A, there=(A,)), "a") == "a: 1 live, 0 queued; no other node takes runs"
    assert drain_line(rows({A: None}, B), "a") is None


def test_nodes_that_wait_for_a_job_are_listed_beside_those_of_the_last_one() -> None:
    waiting = [WaitingRecord(node, f"tls:{node}:1", 1, "0.1") for node in (A, NodeId("c"))]
    found = {row["node"]: row for row in with_waiting(rows({}, there=(B,)), waiting)}
    assert [(name, row["there"], row["waits"]) for name, row in found.items()] == [
        ("a", True, True),
        ("b", True, False),
        ("c", True, True),
    ]
    assert {tuple(row) for row in with_waiting(rows({}), [])} == {tuple(found["b"])}
    assert set(found["c"]) == set(found["b"])
