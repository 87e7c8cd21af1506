"""A disk that is full, or fails: the run whose journal it holds is stopped with that reason, the others go on."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import StorageFull
from gyre.ids import CallId, RunId
from gyre.proxy.closed_runs import ClosedRun, ClosedRuns
from gyre.proxy.gateway import Gateway
from gyre.proxy.journal_writer import JournalWriter, read_journal
from gyre.trajectory.journal import CallDelivered, RunClosed
from gyre.trajectory.records import RunTrace

from .conftest import Proxy, StartProxy

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def fill_disk_of(proxy: Proxy, run: str) -> None:
    """From now on every write to the run's journal finds the device full, as /dev/full does it."""
    journal = proxy.gateway._runs[RunId(run)]._journal
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._file)
    os.close(full)


async def test_a_full_disk_stops_the_run_with_that_reason_and_no_other(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "a long answer", token_s=0.01)
    for run in ("full", "fine"):
        await proxy.open(run)
        await proxy.chat(run, HELLO)
    more = [*HELLO, {"role": "assistant", "content": "a long answer"}, {"role": "user", "content": "more"}]
    during = asyncio.create_task(proxy.post("full", "chat/completions", {"model": "m", "messages": more}))
    others = asyncio.create_task(proxy.chat("fine", more))
    await proxy.until_sampled("a", 3, requests=2)
    fill_disk_of(proxy, "full")
    status, answer = await during
    assert (status, answer["error"]["code"]) == (410, "run_closed")
    assert "No space left on device" in answer["error"]["message"]
    assert (await others)["content"] == "a long answer"
    status, answer = await proxy.post("full", "chat/completions", {"model": "m", "messages": HELLO})
    assert status == 410
    assert list(proxy.gateway.status().failed_runs) == ["full"]
    trace = await proxy.close("full")
    assert trace.failure == "the run's journal could not be written: No space left on device"
    # What it did before stands in its books; whether it is trained is for others to say.
    assert trace.calls == 1
    assert (await proxy.close("fine")).failure == ""
    assert proxy.gateway.status().failed_runs == {"full": trace.failure}


async def test_a_full_disk_under_the_lineages_makes_a_run_without_any(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(lambda head: "hi")
    await proxy.open("r")
    await proxy.chat("r", HELLO)
    (proxy.gateway.config.trajectories_dir / "r.1.draft").symlink_to("/dev/full")
    trace = await proxy.close("r")
    assert trace.lineages == ()
    assert trace.failure == "the lineages of run r could not be written: No space left on device"


async def test_a_journal_is_gone_on_with_behind_its_last_sound_record(tmp_path: Path) -> None:
    first = JournalWriter(tmp_path, fsync=True)
    first.append(CallDelivered(CallId("1")))
    await first.sync()
    await first.close()
    (segment,) = tmp_path.iterdir()
    with segment.open("ab") as file:
        file.write(b"torn")
    assert read_journal(tmp_path) == [CallDelivered(CallId("1"))]
    second = JournalWriter(tmp_path, fsync=False)
    second.append(CallDelivered(CallId("2")))
    await second.close()
    assert read_journal(tmp_path) == [CallDelivered(CallId("1")), CallDelivered(CallId("2"))]


async def test_a_long_journal_has_several_segments_and_ends_at_the_first_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.proxy.journal_writer.SEGMENT_BYTES", 100)
    journal = JournalWriter(tmp_path, fsync=True)
    records = [CallDelivered(CallId(f"call {place}")) for place in range(20)]
    for record in records:
        journal.append(record)
    await journal.sync()
    await journal.close()
    segments = sorted(tmp_path.iterdir())
    assert len(segments) > 3
    assert read_journal(tmp_path) == records
    damaged = bytearray(segments[1].read_bytes())
    damaged[-1] ^= 1
    segments[1].write_bytes(bytes(damaged))
    kept = read_journal(tmp_path)
    assert kept == records[: len(kept)]
    assert 0 < len(kept) < len(records)
    assert read_journal(tmp_path) == kept


async def test_a_failed_write_fails_for_good_and_leaves_no_torn_record(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, fsync=True)
    journal.append(CallDelivered(CallId("1")))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        (segment,) = tmp_path.iterdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (segment.stat().st_size + 10, hard))
        with pytest.raises(StorageFull, match="File too large"):
            journal.append(CallDelivered(CallId("2" * 100)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    with pytest.raises(StorageFull):
        journal.append(RunClosed(RunId("r"), 1, ""))
    await journal.close()
    assert read_journal(tmp_path) == [CallDelivered(CallId("1"))]


def test_a_damaged_file_of_a_closed_run_is_no_closed_run(tmp_path: Path) -> None:
    trace = RunTrace(RunId("r"), 1, 1, 2, 2, 5, (), 0, 0, 0, 0.0, "")
    ClosedRuns(tmp_path).write(ClosedRun(trace, ()))
    assert ClosedRuns(tmp_path).read(RunId("r"), 1) == ClosedRun(trace, ())
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-2] ^= 4
    path.write_bytes(bytes(data))
    assert ClosedRuns(tmp_path).read(RunId("r"), 1) is None
    assert ClosedRuns(tmp_path).read(RunId("r"), 2) is None


async def test_what_is_no_journal_among_the_open_ones_is_passed_over(
    start_proxy: StartProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await start_proxy(lambda head: "hi")
    await proxy.open("r")
    await proxy.chat("r", HELLO)
    journal_dir = proxy.gateway.config.journal_dir
    await proxy.gateway.stop()
    for name in ("x/notes", "x/²", "x/007", "y/1/000000.journal"):
        (journal_dir / "open" / name).mkdir(parents=True)
    again = Gateway(proxy.gateway.config)
    with caplog.at_level(logging.WARNING):
        await again.start()
    try:
        assert again.status().open_runs == 1
    finally:
        await again.stop()
    for name in ("x/notes", "x/²", "x/007"):
        assert f"open/{name}' is no attempt's journal, and is passed over" in caplog.text
    assert "the journal of run y, attempt 1, cannot be read: [Errno 21] Is a directory" in caplog.text
