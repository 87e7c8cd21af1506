"""The gateway: the runs that are open, the engines they may use, and the proxy's front door.

The node tells it which engines there are and which runs to let in; harnesses reach it over HTTP under
`/run/<run>/<key>`. It promises that a switch of a cell, an engine's death or its own only slows an answer down, and
that what a closed run left is on disk. It comes back on the same port with every open run's tree read from its journal.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from gyre.actors.messages import (
    CloseRun,
    DrainEngine,
    DrainReport,
    GatewayStatus,
    GetLineages,
    Lineages,
    OpenRun,
    SetRoutes,
)
from gyre.actors.messages_journals import Attempt
from gyre.engine.client import EngineClient
from gyre.errors import BadInput, Refused, StorageFull
from gyre.harness.profiles import profile
from gyre.harness.wire import GENERIC, Wire
from gyre.ids import CellId, NodeId, RunId
from gyre.proxy.aside import Aside
from gyre.proxy.closed_keys import ClosedKeys
from gyre.proxy.closed_runs import ClosedRun, ClosedRuns
from gyre.proxy.copied_journals import CopiedJournals
from gyre.proxy.departure import Departure, Resting
from gyre.proxy.dialects.spoken import Spoken
from gyre.proxy.engines import Engines
from gyre.proxy.faults import Fault, FaultKind
from gyre.proxy.front import Front
from gyre.proxy.journal_writer import JournalWriter, read_journal
from gyre.proxy.journals import closed_folder, open_folder, open_journals
from gyre.proxy.live_run import Limits, LiveRun
from gyre.proxy.metering import Metering
from gyre.proxy.rendering import Rendering
from gyre.proxy.session import Session, opened_record
from gyre.sched.placement import NOWHERE
from gyre.trajectory.journal import CallStarted, RunClosed, RunOpened
from gyre.trajectory.records import RunTrace

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatewayConfig:
    journal_dir: Path
    trajectories_dir: Path
    model_dir: Path
    context_tokens: int
    copies_dir: Path | None = None
    """Of other nodes' journals. None: no journal has a copy at another node, ours neither."""
    node: NodeId = NOWHERE
    """Whose gateway it is, for those that keep copies."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one, and the same again after a restart."""
    renderer: str = "auto"
    thinking: bool = False
    j_max: int = 5
    request_bytes: int = 64 * 1024 * 1024
    block_tokens: int = 16
    resting_kv_mib_s: int = 0
    """How quickly an engine takes over KV that no request waits for; 0: as quickly as it can."""
    kv_silence_s: float | None = None
    """An engine that does not say within that which KV it has is given up; None: with the deadline of the move."""
    fsync: bool = True
    """Whether a record is on the disk itself before an answer that rests on it is complete, or only with the kernel."""
    wait_s: float = 1800.0
    """The longest a call goes without a token before the harness is told that no engine could answer."""
    engine_key: str = field(default="", repr=False)
    """What engines want of their clients (gyre.engine.access); empty for engines that want none."""
    metrics_key: str = field(default="", repr=False)
    """What `/metrics` wants to be shown; empty: nobody is shown them."""


class Gateway:
    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.copies = CopiedJournals(config.node, config.journal_dir, config.trajectories_dir, config.copies_dir)
        self._open_dir = config.journal_dir / "open"
        self._closed_dir = config.journal_dir / "closed"
        self._rendering = Rendering(config.model_dir, config.renderer, thinking=config.thinking)
        spoken = Spoken()
        self._aside = Aside()
        self._dialects = spoken.by_name()
        self._limits = Limits(config.context_tokens, config.block_tokens, config.wait_s)
        self._metering = Metering()
        self._engines = Engines(
            config.wait_s,
            lambda url: EngineClient(url, key=config.engine_key),
            config.resting_kv_mib_s * (1 << 20),
            self._metering.moved,
            config.kv_silence_s,
        )
        self._runs: dict[RunId, LiveRun] = {}
        self._closed_keys = ClosedKeys(config.journal_dir)
        self._closing: dict[RunId, asyncio.Lock] = {}
        self._closed = ClosedRuns(config.trajectories_dir)
        self._routing = asyncio.Lock()
        self._failed: dict[str, str] = {}
        self._calls = 0
        self._sampled_tokens = 0
        self._recomputed_tokens = 0
        self._max_silence_s = 0.0
        self._front = Front(
            self, spoken, config.model_dir.name, config.context_tokens, config.request_bytes, self._aside
        )

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Read the journals of open runs, and serve. Raises BadInput when the port is taken."""
        for folder in (self._open_dir, self._closed_dir, self.config.trajectories_dir):
            folder.mkdir(parents=True, exist_ok=True)
        self._restore()
        port_file = self.config.journal_dir / "port"
        port = self.config.port
        if not port:
            with suppress(OSError, ValueError):
                port = int(port_file.read_text(encoding="ascii"))
        port = await self._front.start(self.config.host, port)
        with suppress(OSError):
            port_file.write_text(str(port), encoding="ascii")

    async def stop(self) -> None:
        """Serve no more. Open runs stay open in their journals.

        Connections are dropped before the calls end: a harness sends its request again, and would not after an error.
        """
        await self._front.stop()
        for live in self._runs.values():
            await live.end()
            await live.close_journal()
        await self.copies.close()
        await self._engines.close()
        self._aside.close()

    @property
    def base_url(self) -> str:
        return self._front.base_url

    # ------------------------------------------------------------------------------------------ engines

    async def set_routes(self, order: SetRoutes) -> None:
        async with self._routing:
            await self._engines.set_routes(order)

    def accepts(self, cell: CellId) -> bool:
        """Whether the cell's route says that it takes requests."""
        return self._engines.accepts(cell)

    async def drain(self, order: DrainEngine) -> DrainReport:
        """Stop what is in flight on the cell and go on elsewhere; runs between calls take their KV along too."""
        return await Departure(self._engines, self._resting).carry_out(order)

    # ------------------------------------------------------------------------------------------ runs

    async def open_run(self, order: OpenRun) -> None:
        """Let the run in. Raises Refused for an attempt older than, or other than, the one that is open."""
        if not _RUN_NAME.fullmatch(order.run):
            raise BadInput("run", order.run, "letters, digits, '.', '_' and '-', not more than 128")
        live = self._runs.get(order.run)
        if live is not None:
            opened = live.session.opened
            if order.attempt < opened.attempt:
                raise Refused(f"run {order.run}: attempt {order.attempt} is over; attempt {opened.attempt} is open")
            if order.attempt == opened.attempt:
                if order != opened:
                    raise Refused(f"run {order.run}, attempt {order.attempt}: it is open with other settings")
                return
            await self._discard(live)
        if self._closed.read(order.run, order.attempt) is not None:
            raise Refused(f"run {order.run}, attempt {order.attempt}: it is closed")
        journal = self._journal(order.run, order.attempt)
        session = Session(order, self._rendering, self._dialects, _wire_of(order.profile))
        try:
            journal.append(opened_record(order))
            await journal.sync()
        except StorageFull:
            await journal.close()
            raise
        self._runs[order.run] = self._live(session, journal)
        self._failed.pop(order.run, None)

    async def close_run(self, order: CloseRun) -> RunTrace:
        """End the run; returns its trace, the same each time it is asked for."""
        async with self._closing.setdefault(order.run, asyncio.Lock()):
            try:
                return await self._close(order)
            finally:
                if order.run not in self._runs:
                    self._closing.pop(order.run, None)

    async def _close(self, order: CloseRun) -> RunTrace:
        closed = self._closed.read(order.run, order.attempt)
        live = self._runs.get(order.run)
        if closed is not None and (live is None or live.session.opened.attempt != order.attempt):
            await self.copies.closed(Attempt(order.run, order.attempt))
            return closed.trace
        if live is None:
            raise Refused(f"run {order.run}: no such run is open")
        session = live.session
        if session.opened.attempt != order.attempt:
            raise Refused(f"run {order.run}: attempt {session.opened.attempt} is open, not {order.attempt}")
        await live.end()
        trace, lineages = session.trace(self.config.j_max)
        try:
            self._closed.write(ClosedRun(trace, lineages))
        except StorageFull as error:
            # The run cannot be trained from, and says so; its figures are still good.
            session.failure = session.failure or str(error)
            trace = replace(trace, lineages=(), counted_tokens=0, failure=session.failure)
        await live.close_journal(RunClosed(run=order.run, attempt=order.attempt, failure=session.failure))
        if session.failure:
            self._failed[order.run] = session.failure
        self._metering.closed(trace)
        self._retire(live)
        await self.copies.closed(Attempt(order.run, order.attempt))
        return trace

    def lineages(self, order: GetLineages) -> Lineages:
        return Lineages(self._closed.lineages(order.run, order.attempt, order.indices))

    def status(self) -> GatewayStatus:
        sessions = [live.session for live in self._runs.values()]
        return GatewayStatus(
            base_url=self.base_url,
            open_runs=len(sessions),
            calls_in_flight=sum(live.calls_in_flight for live in self._runs.values()),
            calls_waiting=self._engines.waiting,
            in_flight=self._engines.in_flight(),
            calls=self._calls + sum(session.answered_calls for session in sessions),
            sampled_tokens=self._sampled_tokens + sum(session.tree.sampled_tokens for session in sessions),
            max_silence_s=max((self._max_silence_s, *(session.max_silence_s for session in sessions))),
            prefix_tokens_recomputed=self._recomputed_tokens + sum(session.recomputed_tokens for session in sessions),
            failed_runs={
                **self._failed,
                **{session.opened.run: session.failure for session in sessions if session.failure},
            },
        )

    # ------------------------------------------------------------------------------------------ the front's side

    def admit(self, run: str, key: str) -> LiveRun:
        """The open run that `key` opens. Raises Fault(UNAUTHORIZED) or Fault(CLOSED)."""
        live = self._runs.get(RunId(run))
        known = self._closed_keys.of(RunId(run)) if live is None else live.session.opened.key
        if known is None or not hmac.compare_digest(known.encode(), key.encode("utf-8", "replace")):
            raise Fault(FaultKind.UNAUTHORIZED, "no such run, or not its key")
        if live is None:
            raise Fault(FaultKind.CLOSED, "the run is closed")
        return live

    def metrics(self, authorization: str) -> bytes | None:
        """In Prometheus's text format, for whoever shows their key."""
        wanted = f"Bearer {self.config.metrics_key}"
        if not self.config.metrics_key or not hmac.compare_digest(
            wanted.encode(), authorization.encode("utf-8", "replace")
        ):
            return None
        return self._metering.render(self.status(), self.copies.behind_bytes)

    # ------------------------------------------------------------------------------------------ private

    def _live(self, session: Session, journal: JournalWriter) -> LiveRun:
        return LiveRun(session, journal, self._engines, self._rendering, self._limits, self._metering, self._aside)

    def _journal(self, run: RunId, attempt: int) -> JournalWriter:
        replica = self.copies.link(Attempt(run, attempt))
        return JournalWriter(self._folder(run, attempt), fsync=self.config.fsync, replica=replica)

    def _folder(self, run: RunId, attempt: int) -> Path:
        return open_folder(self.config.journal_dir, run, attempt)

    def _retire(self, live: LiveRun) -> None:
        """Take a closed run out of the open ones, and its journal with it."""
        session = live.session
        opened = session.opened
        self._calls += session.answered_calls
        self._sampled_tokens += session.tree.sampled_tokens
        self._recomputed_tokens += session.recomputed_tokens
        self._max_silence_s = max(self._max_silence_s, session.max_silence_s)
        del self._runs[opened.run]
        self._engines.forget(opened.run)
        if all(other.session.opened.group != opened.group for other in self._runs.values()):
            self._engines.forget_group(opened.group)
        self._closed_keys.add(opened.run, opened.key)
        self._put_away(opened.run, opened.attempt)

    def _put_away(self, run: RunId, attempt: int) -> None:
        folder, closed = self._folder(run, attempt), closed_folder(self.config.journal_dir, run, attempt)
        try:
            folder.rename(closed)
            folder.parent.rmdir()
        except OSError as error:
            _log.warning("the journal of run %s stays among the open ones: %s", run, error)

    async def _discard(self, live: LiveRun) -> None:
        """A higher attempt begins: what this one did is of no more use."""
        await live.end()
        opened = live.session.opened
        await live.close_journal(RunClosed(run=opened.run, attempt=opened.attempt, failure="a later attempt began"))
        self._retire(live)
        self.copies.forget(Attempt(opened.run, opened.attempt))

    def _restore(self) -> None:
        """Open again what the journals say was open, and know what is closed."""
        places = open_journals(self.config.journal_dir)
        for other in sorted(set(self._open_dir.glob("*/*")) - {place.folder for place in places}):
            _log.warning("%r is no attempt's journal, and is passed over", str(other))
        for run, attempt, folder in ((place.run, place.attempt, place.folder) for place in places):
            try:
                records = read_journal(folder)
            except OSError as error:
                _log.warning("the journal of run %s, attempt %d, cannot be read: %s", run, attempt, error)
                continue
            first = records[0] if records else None
            over = (bool(records) and isinstance(records[-1], RunClosed)) or self._closed.read(run, attempt) is not None
            if over or not isinstance(first, RunOpened):
                self._put_away(run, attempt)
                continue
            opened = OpenRun(run, first.group, attempt, first.key, first.profile, first.temperature, first.max_tokens)
            session = Session(opened, self._rendering, self._dialects, _wire_of(opened.profile))
            session.restore(records[1:])
            started = sum(isinstance(entry, CallStarted) for entry in records)
            _log.info("run %s is open again, with %d calls of its journal", run, started)
            older = self._runs.get(run)
            if older is not None:
                self._put_away(run, older.session.opened.attempt)
            self._runs[run] = self._live(session, self._journal(run, attempt))
            if session.unfinished():
                self._engines.inherit()
        self._closed_keys.restore()

    def _resting(self, cell: CellId, version: int) -> list[Resting]:
        return [prefix for live in self._runs.values() for prefix in live.resting(cell, version)]


def _wire_of(profile_name: str) -> Wire:
    """What the profile says of its harness's requests; of a harness that no profile describes, what is common to all."""
    try:
        return profile(profile_name).wire
    except BadInput:
        return GENERIC
