"""Journals with a copy at a peer: nothing settled is lost with the node, and whatever the peer does, it is caught up with."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TypeVar

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.actors.messages_journals import AskHeld, Attempt, CopyJournal, Held, PutAway
from gyre.actors.reference import patience_s
from gyre.deadline import handling_until_s
from gyre.errors import BadInput, Refused, Unavailable
from gyre.ids import CallId, NodeId, RunId
from gyre.proxy.closed_runs import ClosedRun, ClosedRuns
from gyre.proxy.held_copies import LINEAGES, HeldCopies
from gyre.proxy.journal_writer import JournalWriter, look_at_journal
from gyre.proxy.replication import NO_PEER, Replication
from gyre.trajectory.journal import CallDelivered
from gyre.trajectory.records import RunTrace

from .conftest import until

R = TypeVar("R")
ME, PEER, NEXT = NodeId("a"), NodeId("b"), NodeId("c")
RUN = Attempt(RunId("r"), 1)
TRACE = RunTrace(RUN.run, RUN.attempt, 1, 1, 1, 1, (), 0, 0, 0, 0.0, "")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.proxy.replication._SHORTEST_PAUSE_S", 0.002)


class NearPeer:
    """The way to copies that are held in this process; it can be cut, and what it is asked be left without an answer."""

    def __init__(self, root: Path) -> None:
        self.copies = HeldCopies(root)
        self.reachable = True
        self.answers = True
        self.bytes = 0

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        if not self.answers:
            await asyncio.sleep(deadline_s)
        if not (self.reachable and self.answers):
            raise Unavailable("the peer cannot be reached")
        match message:
            case AskHeld():
                answer: object = self.copies.held(message)
            case CopyJournal():
                self.bytes += len(message.data)
                answer = self.copies.copy(message)
            case PutAway():
                answer = self.copies.put_away(message)
            case _:
                raise AssertionError(message)
        assert isinstance(answer, reply)
        return answer


def a_replication(peer: NearPeer | None) -> Replication:
    replication = Replication(ME)
    replication.go_to(PEER, peer)
    return replication


def folder_of(root: Path) -> Path:
    return root / "open" / RUN.run / f"{RUN.attempt}"


def copy_of(root: Path) -> Path:
    return folder_of(root / ME)


def closed_copy_of(root: Path) -> Path:
    return root / ME / "closed" / f"{RUN.run}.{RUN.attempt}"


def record(number: int) -> CallDelivered:
    return CallDelivered(CallId(f"call {number}"))


def records(folder: Path) -> list[object]:
    return list(look_at_journal(folder).records)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def a_writer(root: Path, replication: Replication) -> JournalWriter:
    return JournalWriter(folder_of(root), fsync=True, replica=replication.link(RUN, folder_of(root)))


async def put_away(root: Path, journal: JournalWriter) -> tuple[Path, Path]:
    """Close the journal as a gateway does; its folder, and the file of its lineages."""
    closed = ClosedRuns(root / "trajectories")
    closed.write(ClosedRun(TRACE, ()))
    await journal.close()
    folder = root / "closed" / f"{RUN.run}.{RUN.attempt}"
    folder.parent.mkdir()
    folder_of(root).rename(folder)
    return folder, closed.path(RUN.run, RUN.attempt)


async def test_a_synced_record_is_on_the_peers_disk(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    replication = a_replication(NearPeer(there))
    journal = a_writer(here, replication)
    for number in range(5):
        journal.append(record(number))
        await journal.sync()
        assert records(copy_of(there)) == [record(each) for each in range(number + 1)]
    assert replication.status().behind_bytes == 0
    await journal.close()
    await replication.close()


class FarPeer(NearPeer):
    """One that is asked as an actor of another process is: with no more time than the request that is handled has."""

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        patience_s("b/gateway", message, deadline_s, asyncio.get_running_loop().time())
        return await super().ask(message, deadline_s, reply)


async def test_a_copy_goes_on_after_the_time_of_the_request_in_which_it_was_begun(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    replication, peer = Replication(ME), FarPeer(there)

    async def handled() -> JournalWriter:
        handling_until_s.set(asyncio.get_running_loop().time() + 0.01)
        journal = a_writer(here, replication)
        replication.go_to(PEER, peer)
        return journal

    journal = await asyncio.create_task(handled())
    await asyncio.sleep(0.02)
    journal.append(record(0))
    await journal.sync()
    assert records(copy_of(there)) == [record(0)]
    await journal.close()
    await replication.close()


async def test_while_the_peer_is_away_the_run_goes_on_and_then_the_copy_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gyre.proxy.journal_writer.SEGMENT_BYTES", 100)  # so that it must catch up over segments
    here, there = tmp_path / "here", tmp_path / "there"
    peer = NearPeer(there)
    replication = a_replication(peer)
    journal = a_writer(here, replication)
    journal.append(record(0))
    await journal.sync()
    peer.reachable = False
    for number in range(1, 10):
        journal.append(record(number))
        await journal.sync()
    assert records(copy_of(there)) == [record(0)]
    status = replication.status()
    assert (status.peer, status.behind_runs, status.why) == (PEER, 1, "the peer cannot be reached")
    assert status.behind_bytes > 0
    assert caplog.text.count("goes on without the copy of its journal: the peer cannot be reached") == 1
    peer.reachable = True
    await until(lambda: replication.status().behind_bytes == 0)
    assert records(copy_of(there)) == [record(number) for number in range(10)]
    journal.append(record(10))
    await journal.sync()
    assert records(copy_of(there))[-1] == record(10)
    await journal.close()
    await replication.close()


async def test_a_peer_that_does_not_answer_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.proxy.replication.COPY_S", 0.05)
    peer = NearPeer(tmp_path / "there")
    peer.answers = False
    replication = a_replication(peer)
    journal = a_writer(tmp_path / "here", replication)
    for number in range(3):
        journal.append(record(number))
        await journal.sync()
    assert replication.status().behind_runs == 1
    await journal.close()
    await replication.close()


async def test_without_a_peer_nothing_waits_and_one_that_comes_gets_all(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    replication = a_replication(None)
    journal = a_writer(here, replication)
    journal.append(record(0))
    await journal.sync()
    assert replication.status().why == NO_PEER
    replication.go_to(PEER, NearPeer(there))
    await until(lambda: not replication.status().behind_runs)
    assert records(copy_of(there)) == [record(0)]
    await journal.close()
    await replication.close()


async def test_another_peer_gets_all_segments_of_an_open_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.proxy.journal_writer.SEGMENT_BYTES", 100)
    here, first, second = (tmp_path / name for name in ("here", "first", "second"))
    replication = a_replication(NearPeer(first))
    journal = a_writer(here, replication)
    for number in range(10):
        journal.append(record(number))
    await journal.sync()
    replication.go_to(NEXT, NearPeer(second))
    journal.append(record(10))
    await journal.sync()
    assert files_of(copy_of(second)) == files_of(folder_of(here))
    assert len(files_of(copy_of(second))) > 2
    assert records(copy_of(first)) == [record(number) for number in range(10)]
    await journal.close()
    await replication.close()


async def test_a_copy_that_is_not_the_beginning_of_the_journal_is_made_anew(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    copy_of(there).mkdir(parents=True)
    (copy_of(there) / "000000.journal").write_bytes(b"GYREJRN1" + b"another life" * 40)
    replication = a_replication(NearPeer(there))
    journal = a_writer(here, replication)
    journal.append(record(0))
    await journal.sync()
    assert records(copy_of(there)) == [record(0)]
    await journal.close()
    await replication.close()


async def test_a_journal_opened_again_sends_only_what_the_peer_lacks(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    peer = NearPeer(there)
    for first in (0, 3):
        replication = a_replication(peer)
        journal = a_writer(here, replication)
        for number in range(first, first + 3):
            journal.append(record(number))
        await journal.sync()
        await journal.close()
        await replication.close()
    assert records(copy_of(there)) == records(folder_of(here)) == [record(number) for number in range(6)]
    assert peer.bytes == sum(path.stat().st_size for path in folder_of(here).iterdir())


async def test_a_closed_journal_is_whole_at_the_peer_with_its_lineages(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    replication = a_replication(NearPeer(there))
    journal = a_writer(here, replication)
    journal.append(record(0))
    await journal.sync()
    folder, lineages = await put_away(here, journal)
    await replication.closed(RUN, folder, lineages).whole()
    assert files_of(closed_copy_of(there)) == {**files_of(folder), LINEAGES: lineages.read_bytes()}
    assert not copy_of(there).parent.exists()

    # A gateway that begins anew finds all of it there.
    peer = NearPeer(there)
    again = a_replication(peer)
    await again.closed(RUN, folder, lineages).whole()
    assert peer.bytes == 0
    for each in (replication, again):
        await each.close()


async def test_a_peer_that_has_lost_its_copy_gets_it_again(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    peer = NearPeer(there)
    replication = a_replication(peer)
    journal = a_writer(here, replication)
    journal.append(record(0))
    await journal.sync()
    (copy_of(there) / "000000.journal").unlink()
    folder, lineages = await put_away(here, journal)
    replication.closed(RUN, folder, lineages)
    await until(lambda: closed_copy_of(there).is_dir())
    assert files_of(closed_copy_of(there)) == {**files_of(folder), LINEAGES: lineages.read_bytes()}
    await replication.close()


async def test_what_is_not_to_be_kept_is_copied_no_more(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    replication = a_replication(None)
    journal = a_writer(here, replication)
    replication.keep(())
    assert RUN in replication, "it is open"
    folder, lineages = await put_away(here, journal)
    replication.closed(RUN, folder, lineages)
    replication.keep((RUN,))
    assert RUN in replication
    replication.keep(())
    replication.go_to(PEER, NearPeer(there))
    assert replication.status().behind_runs == 0
    assert RUN not in replication
    await replication.close()


EVENTS = st.lists(
    st.sampled_from(("write", "sync", "cut", "mend", "another peer", "no peer", "a new gateway", "tear the copy")),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, segment_bytes=st.sampled_from((60, 200, 10_000)))
def test_whatever_comes_between_the_last_peer_has_all_in_the_end(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], segment_bytes: int
) -> None:
    root = tmp_path_factory.mktemp("copying")

    async def play() -> None:
        peers = {PEER: NearPeer(root / PEER), NEXT: NearPeer(root / NEXT)}
        now, written = PEER, 0
        replication = a_replication(peers[now])
        journal = a_writer(root, replication)
        for event in events:
            match event:
                case "write":
                    journal.append(record(written))
                    written += 1
                case "sync":
                    await journal.sync()
                case "cut" | "mend":
                    peers[now].reachable = event == "mend"
                case "another peer":
                    now = NEXT if now == PEER else PEER
                    replication.go_to(now, peers[now])
                case "no peer":
                    replication.go_to(now, None)
                case "a new gateway":
                    await journal.close()
                    await replication.close()
                    replication = a_replication(peers[now])
                    journal = a_writer(root, replication)
                case _:
                    replication.go_to(now, None)
                    for copy in (root / now / ME).glob("open/*/*/*"):
                        os.truncate(copy, copy.stat().st_size // 2)
                    replication.go_to(now, peers[now])
            await asyncio.sleep(0)
        peers[now].reachable = True
        replication.go_to(now, peers[now])
        folder, lineages = await put_away(root, journal)
        replication.closed(RUN, folder, lineages)
        await until(closed_copy_of(root / now).is_dir)
        assert files_of(closed_copy_of(root / now)) == {**files_of(folder), LINEAGES: lineages.read_bytes()}
        assert records(closed_copy_of(root / now)) == [record(number) for number in range(written)]
        await replication.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyre.proxy.journal_writer.SEGMENT_BYTES", segment_bytes)
        asyncio.run(play())


# ------------------------------------------------------------------------------------------------ the peer's side


def copy(copies: HeldCopies, at: int, piece: bytes, file: str = "000000.journal") -> Held:
    checksum = xxhash.xxh3_64_intdigest(piece)
    return copies.copy(CopyJournal(ME, RUN.run, RUN.attempt, file, at, piece, checksum))


@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=1, max_size=200), cut=st.integers(0, 200), offset=st.integers(0, 220))
def test_a_copy_never_has_a_hole(tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, offset: int) -> None:
    copies = HeldCopies(tmp_path_factory.mktemp("there"))
    held = copy(copies, 0, data[:cut]).bytes
    assert copy(copies, offset, b"more").bytes == (offset + 4 if offset <= held else held)


@settings(max_examples=60, deadline=None)
@given(kept=st.integers(0, 400), damaged=st.booleans())
def test_only_a_whole_copy_is_taken_over(tmp_path_factory: pytest.TempPathFactory, kept: int, damaged: bool) -> None:
    root = tmp_path_factory.mktemp("there")
    copies, own = HeldCopies(root / "copies"), (root / "journal", root / "trajectories")
    written = ClosedRuns(root / "theirs")
    written.write(ClosedRun(TRACE, ()))
    lineages = written.path(RUN.run, RUN.attempt).read_bytes()
    piece = lineages[:kept]
    copy(copies, 0, b"journal")
    copy(copies, 0, bytes([piece[0] ^ 1]) + piece[1:] if damaged and piece else piece, LINEAGES)
    away = PutAway(ME, RUN.run, RUN.attempt, {"000000.journal": 7, LINEAGES: len(lineages)})
    if len(piece) < len(lineages):
        with pytest.raises(Refused, match="lacks some of lineages"):
            copies.put_away(away)
        assert copies.take_over((RUN,), *own) == ()
        return
    copies.put_away(away)
    assert copies.take_over((RUN,), *own) == (() if damaged else (RUN,))
    if not damaged:
        assert copies.take_over((RUN,), *own) == (RUN,), "it may be asked again"
        assert ClosedRuns(own[1]).read(RUN.run, RUN.attempt) == ClosedRun(TRACE, ())
        assert files_of(own[0] / "closed" / "r.1") == {"000000.journal": b"journal"}
        assert copies.places() == []


def test_a_copy_is_deleted_with_its_folders(tmp_path: Path) -> None:
    copies = HeldCopies(tmp_path)
    copy(copies, 0, b"journal")
    (place,) = copies.places()
    assert (place.copy_of, place.run, place.attempt) == (ME, RUN.run, RUN.attempt)
    copies.forget(place)
    assert copies.places() == []
    assert not (tmp_path / ME / "open" / RUN.run).exists()


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden"])
def test_no_name_is_a_way_out_of_the_folder(tmp_path: Path, name: str) -> None:
    for message in (
        AskHeld(NodeId(name), RUN.run, 1, "000000.journal"),
        AskHeld(ME, RunId(name), 1, "000000.journal"),
        AskHeld(ME, RUN.run, 1, name),
    ):
        with pytest.raises(BadInput, match=r"(node|run|file): .* is not allowed"):
            HeldCopies(tmp_path).held(message)


def test_data_that_was_damaged_on_the_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="checksum"):
        HeldCopies(tmp_path).copy(CopyJournal(ME, RUN.run, 1, "000000.journal", 0, b"data", 1))
    assert not list(tmp_path.iterdir())
