"""The engines as the gateway uses them: a client for each, a seat for every request, and the wait until there is one.

A call takes a `Seat` before it asks an engine and gives it back after. Who sits where, and who is next, is `Seating`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gyre.actors.messages import SetRoutes
from gyre.engine.client import EngineClient
from gyre.errors import Refused
from gyre.ids import CellId, GroupId, RunId
from gyre.kv_migrate.prefix import MoveReport, move_prefix
from gyre.proxy.faults import Fault, FaultKind
from gyre.proxy.leftovers import EVERYTHING, Leftovers, LetGo, abort
from gyre.proxy.seating import Seating, Sitter

SUSPICION_S = 1.0
"""How long an engine that failed a call is left alone, unless new routes say otherwise."""
MOVE_S = 10.0
"""The longest a call waits for its KV to move before it computes it again."""
EMPTY_S = 60.0
"""The longest a cell that leaves waits for an engine to say that it let go of everything."""


@dataclass(eq=False)
class Seat:
    cell: CellId
    version: int
    client: EngineClient
    sitter: Sitter


class Engines:
    """`wait_s` bounds a call's wait for an engine; `connect` makes the client of the engine at a URL.

    `resting_bytes_s` bounds how quickly an engine takes over prefixes that no request waits for (0: nothing does); `moved`
    hears of every move, and whether a request waited for it. An engine that is silent for `kv_silence_s` when it is asked
    for blocks is given up.
    """

    def __init__(
        self,
        wait_s: float,
        connect: Callable[[str], EngineClient] = EngineClient,
        resting_bytes_s: float = 0.0,
        moved: Callable[[MoveReport, bool], None] | None = None,
        kv_silence_s: float | None = None,
    ) -> None:
        self._resting_bytes_s = resting_bytes_s
        self._moved = moved
        self._kv_silence_s = kv_silence_s
        self._wait_s = wait_s
        self._connect = connect
        self._inherits_since_s: float | None = None
        self._seating = Seating()
        self._clients: dict[CellId, EngineClient] = {}
        """Of each cell that routes have named, for the engine that they named last."""
        self._suspects: dict[CellId, asyncio.TimerHandle] = {}
        self._seats: set[Seat] = set()
        self._asked: dict[Sitter, asyncio.Future[Seat]] = {}
        self._moves: dict[CellId, set[asyncio.Future[None]]] = {}
        self._calls = 0
        self._leftovers = Leftovers(self._look_at_leftovers)

    # ------------------------------------------------------------------------------------------ routes

    def inherit(self) -> None:
        """A gateway died before us in the middle of calls: every engine is told to let go of all, and gets nothing before."""
        self._inherits_since_s = asyncio.get_running_loop().time()

    async def set_routes(self, order: SetRoutes) -> None:
        self._seating.set_routes(order)
        ended: list[EngineClient] = []
        for route in order.engines:
            self._trust(route.cell)
            known = self._clients.get(route.cell)
            if known is not None and known.url == route.url.rstrip("/"):
                continue
            client = self._clients[route.cell] = self._connect(route.url)
            if self._inherits_since_s is not None:
                self._leftovers.leave(client, EVERYTHING, self._inherits_since_s)
            if known is not None:
                ended.append(known)
        for client in ended:
            self._leftovers.ended(client)
        self._look_at_leftovers()
        for client in ended:  # what still waits for an answer from there goes on elsewhere
            await client.close()

    def close_cell(self, cell: CellId) -> None:
        """No new request to `cell` until routes say that it accepts."""
        self._seating.close(cell)

    def suspect(self, cell: CellId) -> None:
        """`cell` failed a call: leave it alone for a moment."""
        self._trust(cell)
        self._seating.suspect(cell)
        self._suspects[cell] = asyncio.get_running_loop().call_later(SUSPICION_S, self._forgive, cell)

    async def close(self) -> None:
        for cell in list(self._suspects):
            self._trust(cell)
        await self._leftovers.close()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    # ------------------------------------------------------------------------------------------ seats

    def next_asked(self) -> int:
        """A new call's place in the queue, behind all that came before it."""
        self._calls += 1
        return self._calls

    def ask(self, sitter: Sitter) -> asyncio.Future[Seat]:
        """Ask for a seat; the future has it at once where there is one. Await it with `seated`."""
        asked = self._asked[sitter] = asyncio.get_running_loop().create_future()
        self._seating.ask(sitter)
        self._seat_waiting()
        return asked

    async def seated(self, sitter: Sitter, asked: asyncio.Future[Seat]) -> Seat:
        """The seat that was asked for. Raises Fault(UNAVAILABLE) after the wait that is allowed."""
        if asked.done():
            return asked.result()
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(asked)
        except BaseException as error:
            self._asked.pop(sitter, None)
            self._seating.withdraw(sitter)
            if asked.done():
                self.release(asked.result())
            asked.cancel()
            if isinstance(error, TimeoutError):
                raise Fault(FaultKind.UNAVAILABLE, f"no engine was open for {self._wait_s:.0f} s") from error
            raise

    def release(self, seat: Seat) -> None:
        """Give the seat back, to whom it is the turn of."""
        if seat in self._seats:
            self._seats.discard(seat)
            self._seating.leave(seat.sitter)
            self._seat_waiting()

    def is_open(self, seat: Seat) -> bool:
        """Whether a request may still be sent from it: the engine may leave, or end, while KV moves there."""
        route = self._seating.open().get(seat.cell)
        return route is not None and route.version == seat.version and self.client(seat.cell) is seat.client

    async def leave(self, seat: Seat, rid: str) -> None:
        """A request's connection was ended before the engine's answer did. The seat is to be given back after."""
        routed = self.client(seat.cell) is seat.client
        if routed and await abort(seat.client, rid) is LetGo.UNKNOWN and self.client(seat.cell) is seat.client:
            self._leftovers.leave(seat.client, rid, asyncio.get_running_loop().time())
            self._look_at_leftovers()

    def may_be_live(self, rid: str) -> bool:
        """Whether an engine may still sample a request whose connection has ended."""
        return self._leftovers.has(rid)

    async def let_go(self, rid: str) -> None:
        """Return when no engine does."""
        await self._leftovers.gone(rid)

    async def emptied(self, cell: CellId) -> None:
        """Return when nothing that was left at the engine of `cell` is sampled there. Raises Refused when it will not say."""
        client = self.client(cell)
        if client is None:
            return
        try:
            async with asyncio.timeout(EMPTY_S):
                await self._leftovers.emptied(client)
        except TimeoutError as error:
            raise Refused(f"the engine of {cell} may still sample what it was asked: it does not answer") from error

    def computed(self, seat: Seat) -> None:
        """The engine has the prompt of the seat's call in its memory."""
        self._seating.computed(seat.sitter, seat.cell, seat.version)

    def sitters(self, cell: CellId) -> list[Sitter]:
        return self._seating.sitters(cell)

    # ------------------------------------------------------------------------------------------ KV

    async def move(
        self, source: CellId, target: CellId, token_ids: Sequence[int], version: int, *, resting: bool = False
    ) -> MoveReport | None:
        """Bring a prefix from one engine to another; None where one of them is gone, or does not answer.

        One that is `resting` has a rate, and is overtaken by those that a request waits for.
        """
        giver, taker = self.client(source), self.client(target)
        if giver is None or taker is None or self._leftovers.at(giver):
            return None
        under_way = asyncio.get_running_loop().create_future()
        moves = self._moves.setdefault(source, set())
        moves.add(under_way)
        try:
            bytes_s = self._resting_bytes_s if resting else 0.0
            report = await move_prefix(giver, taker, token_ids, version, MOVE_S, bytes_s, self._kv_silence_s)
            if self._moved is not None:
                self._moved(report, not resting)
            return report
        finally:
            moves.discard(under_way)
            under_way.set_result(None)

    def moves_from(self, cell: CellId) -> set[asyncio.Future[None]]:
        """Those under way: each is done when its move has ended."""
        return set(self._moves.get(cell, ()))

    # ------------------------------------------------------------------------------------------ runs

    def rest(self, run: RunId, leaving: CellId) -> CellId | None:
        """Where a prefix of the run is kept for its next request, now that `leaving` leaves; None when nowhere."""
        return self._seating.rest(run, leaving)

    def forget(self, run: RunId) -> None:
        self._seating.forget(run)

    def forget_group(self, group: GroupId) -> None:
        self._seating.forget_group(group)

    # ------------------------------------------------------------------------------------------ reading

    @property
    def version(self) -> int:
        """The authoritative version."""
        return self._seating.version

    def client(self, cell: CellId) -> EngineClient | None:
        return self._clients.get(cell)

    def accepts(self, cell: CellId) -> bool:
        """Whether its route says that it takes requests."""
        route = self._seating.routes.get(cell)
        return route is not None and route.accepting

    def open(self, cell: CellId) -> bool:
        return cell in self._seating.open()

    def in_flight(self) -> dict[str, int]:
        """Requests in flight by cell, every known cell named."""
        return {**self._seating.in_flight()}

    @property
    def waiting(self) -> int:
        return self._seating.waiting

    # ------------------------------------------------------------------------------------------ private

    def _seat_waiting(self) -> None:
        while (found := self._seating.seat_next()) is not None:
            sitter, cell = found
            client = self.client(cell)
            assert client is not None, "every route has its client"
            seat = Seat(cell, self._seating.routes[cell].version, client, sitter)
            self._seats.add(seat)
            self._asked.pop(sitter).set_result(seat)

    def _look_at_leftovers(self) -> None:
        self._seating.uncertain = {cell for cell, client in self._clients.items() if self._leftovers.at(client)}
        self._seat_waiting()

    def _trust(self, cell: CellId) -> None:
        handle = self._suspects.pop(cell, None)
        if handle is not None:
            handle.cancel()
        self._seating.forgive(cell)

    def _forgive(self, cell: CellId) -> None:
        self._suspects.pop(cell, None)
        self._seating.forgive(cell)
        self._seat_waiting()
