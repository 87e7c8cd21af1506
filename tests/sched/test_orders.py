"""Which of a person's orders the leader refuses, and with which words."""

from __future__ import annotations

from gyre.ids import CellId, NodeId
from gyre.sched.orders import refuse_pin, refuse_switch, standing_orders
from gyre.store.records import CellRoleRecord, Role

C0, C1 = CellId("c0"), CellId("c1")


def role(desired: Role, observed: Role, *, epoch: int = 3, rested: int = 0) -> CellRoleRecord:
    return CellRoleRecord(desired, observed, epoch, 7, "", 1, rested)


TRAINS = role(Role.TRAIN, Role.TRAIN)
SERVES = role(Role.ROLLOUT, Role.ROLLOUT)


def test_a_switch_to_the_other_role_is_done() -> None:
    assert refuse_switch(C0, Role.ROLLOUT, {C0: TRAINS, C1: SERVES}, {}, 5) == ""
    assert refuse_switch(C0, Role.TRAIN, {C0: SERVES, C1: SERVES}, {}, 5) == ""


def test_one_that_the_role_machine_would_refuse_is_refused() -> None:
    assert refuse_switch(CellId("c9"), Role.TRAIN, {C0: TRAINS}, {}, 0) == "there is no cell c9; there are c0"
    assert refuse_switch(C0, Role.LOADING, {C0: TRAINS}, {}, 0) == "loading cannot be ordered; rollout and train can"


def test_what_is_so_already_is_said() -> None:
    assert refuse_switch(C0, Role.TRAIN, {C0: TRAINS, C1: SERVES}, {}, 0) == "c0 is there already"
    draining = role(Role.TRAIN, Role.DRAINING)
    assert refuse_switch(C0, Role.TRAIN, {C0: draining}, {}, 0) == "c0 is on its way there (draining)"


def test_a_cell_that_came_back_may_be_sent_again() -> None:
    came_back = role(Role.TRAIN, Role.ROLLOUT, epoch=3, rested=3)
    assert refuse_switch(C0, Role.TRAIN, {C0: came_back, C1: SERVES}, {}, 5) == ""


def test_the_last_cell_that_serves_stays_while_runs_wait_or_live() -> None:
    roles = {C0: TRAINS, C1: SERVES}
    assert (
        refuse_switch(C1, Role.TRAIN, roles, {}, 4) == "c1 is the last one that serves, and 4 runs are queued or live"
    )
    assert refuse_switch(C1, Role.TRAIN, roles, {}, 0) == ""
    failed = {C0: role(Role.ROLLOUT, Role.FAILED), C1: SERVES}
    assert "the last one that serves" in refuse_switch(C1, Role.TRAIN, failed, {}, 4)


def test_a_pin_goes_before_a_switch() -> None:
    roles = {C0: SERVES, C1: SERVES}
    assert refuse_switch(C0, Role.TRAIN, roles, {C0: Role.ROLLOUT}, 0) == "c0 is pinned to rollout; unpin it first"
    assert refuse_switch(C0, Role.TRAIN, roles, {C0: Role.TRAIN}, 0) == ""


def test_pins_leave_one_cell_to_serve() -> None:
    roles = {C0: SERVES, C1: SERVES}
    assert refuse_pin(C0, Role.TRAIN, roles, {}) == ""
    assert "no run would be served" in refuse_pin(C1, Role.TRAIN, roles, {C0: Role.TRAIN})
    assert refuse_pin(C1, Role.ROLLOUT, roles, {C0: Role.TRAIN}) == ""
    assert "no run would be served" in refuse_pin(C0, Role.TRAIN, {C0: SERVES}, {})


def test_the_cells_of_a_node_that_drains_train_while_others_can_serve() -> None:
    a, b = NodeId("a"), NodeId("b")
    homes = {C0: a, C1: b}
    assert standing_orders({}, homes, set()) == {}
    assert standing_orders({}, homes, {a}) == {C0: Role.TRAIN}
    assert standing_orders({C0: Role.ROLLOUT}, homes, {a}) == {C0: Role.TRAIN}, "a pin does not keep it"
    assert standing_orders({C1: Role.ROLLOUT}, homes, {a}) == {C0: Role.TRAIN, C1: Role.ROLLOUT}


def test_the_cells_of_a_node_that_drains_serve_on_where_nobody_else_could() -> None:
    a, b = NodeId("a"), NodeId("b")
    assert standing_orders({}, {C0: a, C1: b}, {a, b}) == {}
    assert standing_orders({C1: Role.TRAIN}, {C0: a, C1: b}, {a}) == {C1: Role.TRAIN}
    assert standing_orders({}, {C0: a}, {a}) == {}, "the other has failed"
