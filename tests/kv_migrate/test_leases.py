"""How long a source holds blocks: until it is told, until nobody comes back, until time or epoch are over."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gyre.errors import Refused
from gyre.kv_migrate.leases import LONGEST_S, RESUME_S, LeaseTable


def test_a_transfer_ends_with_its_acknowledgement_and_only_once() -> None:
    table = LeaseTable(7)
    table.open("x", 7, 0.0, 10.0)
    assert table.acknowledge("x", 7)
    assert not table.acknowledge("x", 7)
    assert table.expire(100.0) == ()


def test_a_broken_connection_leaves_time_to_come_back() -> None:
    table = LeaseTable(1)
    table.open("x", 1, 0.0, 10.0)
    table.attach("x", 1, 0.0)
    table.detach("x", 1, 1.0)
    assert table.next_s() == 10.0, "another connection reads it still"
    table.detach("x", 1, 2.0)
    assert table.next_s() == 2.0 + RESUME_S
    table.attach("x", 1, 2.0 + RESUME_S / 2)
    assert table.expire(9.9) == ()
    assert table.expire(10.0) == ("x",)
    with pytest.raises(Refused, match="holds no blocks"):
        table.attach("x", 1, 10.1)


def test_nobody_holds_blocks_for_longer_than_the_limit() -> None:
    table = LeaseTable(1)
    table.open("x", 1, 0.0, 1e9)
    assert table.next_s() == LONGEST_S


def test_a_fenced_epoch_may_end_what_it_has_and_begins_nothing() -> None:
    table = LeaseTable(1)
    for transfer in ("x", "y"):
        table.open(transfer, 1, 0.0, 10.0)
    table.fence()
    assert (table.epoch, table.of_older_epochs()) == (2, 2)
    with pytest.raises(Refused, match="epoch 1 is over here; this is 2"):
        table.open("z", 1, 0.0, 10.0)
    assert table.acknowledge("x", 1)
    assert table.cut() == ("y",)
    assert not table.acknowledge("y", 1)


def test_an_acknowledgement_of_another_epoch_changes_nothing() -> None:
    table = LeaseTable(1)
    table.open("x", 1, 0.0, 10.0)
    table.fence()
    assert table.cut() == ("x",)
    table.open("x", 2, 0.0, 10.0)
    assert not table.acknowledge("x", 1)
    table.detach("x", 1, 0.0)
    assert "x" in table
    with pytest.raises(Refused, match="epoch 3 is over here"):
        table.open("y", 3, 0.0, 1.0)


class Leases(RuleBasedStateMachine):
    """Whatever happens in whatever order, what is held is what a plain list of rules says."""

    names = st.sampled_from("abc")
    epochs = st.integers(1, 4)

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(1)
        self.now_s = 0.0
        self.held: dict[str, tuple[int, float]] = {}
        self.readers: list[tuple[str, int]] = []

    @rule(name=names, epoch=epochs, hold_s=st.floats(0.1, 3.0))
    def open(self, name: str, epoch: int, hold_s: float) -> None:
        try:
            self.table.open(name, epoch, self.now_s, hold_s)
        except Refused:
            assert epoch != self.table.epoch or name in self.held
        else:
            assert epoch == self.table.epoch
            assert name not in self.held
            self.held[name] = (epoch, self.now_s + hold_s)
            self.readers.append((name, epoch))

    @rule(name=names, epoch=epochs)
    def attach(self, name: str, epoch: int) -> None:
        try:
            self.table.attach(name, epoch, self.now_s)
        except Refused:
            pass
        else:
            assert self.held[name][0] == epoch
            self.readers.append((name, epoch))

    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        if self.readers:
            reader = data.draw(st.sampled_from(self.readers))
            self.readers.remove(reader)
            self.table.detach(*reader, self.now_s)

    @rule(name=names, epoch=epochs)
    def acknowledge(self, name: str, epoch: int) -> None:
        ended = self.table.acknowledge(name, epoch)
        assert ended == (name in self.held and self.held[name][0] == epoch)
        if ended:
            del self.held[name]
            self._forget(name)

    @rule(seconds=st.floats(0.01, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for name in self.table.expire(self.now_s):
            _, until_s = self.held.pop(name)
            # Before its time only what nobody reads.
            assert until_s <= self.now_s or name not in [reader for reader, _ in self.readers]
            self._forget(name)
        assert all(until_s > self.now_s for _, until_s in self.held.values())

    @rule()
    def fence_and_cut(self) -> None:
        self.table.fence()
        for name in self.table.cut():
            assert self.held.pop(name)[0] < self.table.epoch
            self._forget(name)
        assert all(epoch == self.table.epoch for epoch, _ in self.held.values())

    @invariant()
    def it_holds_what_it_should(self) -> None:
        assert len(self.table) == len(self.held)
        assert all(name in self.table for name in self.held)

    def _forget(self, name: str) -> None:
        self.readers = [reader for reader in self.readers if reader[0] != name]


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
