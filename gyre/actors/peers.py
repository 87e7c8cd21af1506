"""Actors across machines: every process of the cluster that we talk to, over one encrypted connection each.

    async with Peers("node-a", credentials, site.actor, "tls:10.0.0.1:7400") as peers:
        core = peers.ref("node-b", "tls:10.0.0.2:7400", "core")
        claim = await core.ask(ClaimMicroStep(cell, version), 5.0, Claim)

Both sides show a certificate of the cluster's authority (gyre.credentials), and each checks that it names the
node that it expects. What gyre.actors.remote promises holds here too; besides:

- A process is named `node`, a gyred, or `node/child`, one of its children; its certificate is the node's.
- Who shows a person's certificate is a guest: any number of connections, nothing is asked of it, and it may ask what
  gyre.actors.guests says.
- Two processes use one connection, whoever made it, for all actors of both. Of two made at the same moment, that of the
  process with the smaller name stays.
- A peer that cannot be reached is tried again after a pause that grows to 5 s; meanwhile asks fail at once, with the
  reason. A wrong or expired certificate is such a reason, and heals when it is renewed.
- A peer that is cut off, or whose machine died, is noticed by the kernel within 20 s: then the connection ends, and
  watched actors have died.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from gyre.actors.address import TcpAddress, keep_alive, listen, parse
from gyre.actors.channel import Channel
from gyre.actors.guests import Guest
from gyre.actors.handshake import Party, greet, introduce
from gyre.actors.link import Link
from gyre.actors.pipe import HANDSHAKE_S, Broken, Pipe, said
from gyre.actors.reference import LocalRef
from gyre.actors.remote import RemoteRef
from gyre.actors.supervision import Backoff
from gyre.credentials import Credentials, Holder
from gyre.errors import BadInput, GyreError, NotLetIn, Refused, Unavailable

log = logging.getLogger(__name__)

PAUSE = Backoff(0.1, 5.0)
CROSSED = "both have connected at the same moment, and the other connection stays"
CROSSED_S = 2.0
"""For the connection that stays to be there."""


def keeps_own(me: str, peer: str, *, dialing: bool, dialed_for_s: float | None) -> bool:
    """Whether a connection that the peer makes now is refused for the one that we are making, or have just made.

    `dialed_for_s` is how long the one that we have made to this life of it is open; None when there is none.
    """
    return me < peer and (dialing or (dialed_for_s is not None and dialed_for_s < HANDSHAKE_S))


def node_of(process: str) -> str:
    """The node that answers for a process: `node`, its gyred, or `node/child`, one of its children."""
    return process.partition("/")[0]


@dataclass(eq=False)
class _Pair:
    """We and one other process."""

    node: str
    place: TcpAddress | None
    channel: Channel
    dialing: bool = False
    dialed: Link | None = None
    """The connection that we have made, if the last one was."""


class Peers:
    """`find` gives the actors that others may reach, by name, or raises Refused. Without an address it only connects."""

    def __init__(self, me: str, credentials: Credentials, find: Callable[[str], LocalRef], address: str = "") -> None:
        self._me = Party.fresh(me)
        self._credentials = credentials
        self._find = find
        self._place = _between_machines(address) if address else None
        self._server: asyncio.Server | None = None
        self._greeting: set[asyncio.Task[None]] = set()
        self._pairs: dict[str, _Pair] = {}
        self._guests: set[Link] = set()

    @property
    def address(self) -> str:
        """With the real port once started; empty when nothing is served."""
        return "" if self._place is None else str(self._place)

    @property
    def incarnation(self) -> str:
        return self._me.incarnation

    def ref(self, node: str, address: str, actor: str, incarnation: str = "") -> RemoteRef:
        """A reference to an actor of another node; with `incarnation`, of that life of it only. Raises BadInput."""
        pair = self._pair(node)
        pair.place = _between_machines(address)
        return RemoteRef(pair.channel, actor, incarnation)

    async def start(self) -> None:
        """Check the certificates, and listen. Raises BadInput or Refused."""
        self._credentials.context(server=True)
        if self._place is not None:
            self._server, found = await listen(self._place, lambda: Pipe(self._accepted))
            assert isinstance(found, TcpAddress)
            self._place = found

    async def close(self) -> None:
        """Stop listening and end all connections; what waits gets Unavailable."""
        if self._server is not None:
            self._server.close()
        greeting = tuple(self._greeting)
        for task in greeting:
            task.cancel()
        await asyncio.gather(*greeting, return_exceptions=True)
        await asyncio.gather(
            *(pair.channel.close() for pair in self._pairs.values()),
            *(guest.close("the node ends") for guest in tuple(self._guests)),
        )
        if self._server is not None:
            await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    def _pair(self, node: str) -> _Pair:
        if node not in self._pairs:
            channel = Channel(node, lambda: self._dial(self._pairs[node]), PAUSE)
            self._pairs[node] = _Pair(node, None, channel)
        return self._pairs[node]

    # ------------------------------------------------------------------ others connect

    def _accepted(self, pipe: Pipe) -> None:
        task = asyncio.get_running_loop().create_task(self._let_in(pipe), name="greet a peer")
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _let_in(self, pipe: Pipe) -> None:
        who = "a stranger"
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                keep_alive(pipe.socket)
                await pipe.secure(self._credentials.context(server=True), server=True)
                holder = Holder.of(pipe.peer_certificate)
                who = holder.name
                peer = await greet(pipe, "", self._me, partial(self._refusal, holder))
        except (Broken, OSError, GyreError) as error:  # TimeoutError and ssl.SSLError are OSErrors
            level = logging.INFO if CROSSED in str(error) else logging.WARNING
            log.log(level, "a connection of %s is closed: %s", who, _reason(error))
            pipe.close("it was not let in")
            return
        except asyncio.CancelledError:
            pipe.abort("the node ends")
            raise
        if holder.client:
            link = Link(pipe, peer.name, peer, lambda actor: Guest(holder.name, self._find(actor)))
            self._guests.add(link)
            link.on_lost = lambda _: self._guests.discard(link)
        else:
            self._pair(peer.name).channel.adopt(Link(pipe, peer.name, peer, self._find))

    def _refusal(self, holder: Holder, peer: Party) -> str:
        """Why the peer is not let in."""
        if node_of(peer.name) != holder.name:
            return f"its certificate names {holder.name!r}, and it calls itself {peer.name!r}"
        if peer.name == self._me.name:
            return f"it calls itself {peer.name!r}, which is this node's name"
        pair = self._pairs.get(peer.name)
        if holder.client or pair is None:
            return ""
        own, for_s = pair.dialed, None
        if own is not None and own.open and own.peer == peer:
            for_s = asyncio.get_running_loop().time() - own.opened_s
        return CROSSED if keeps_own(self._me.name, peer.name, dialing=pair.dialing, dialed_for_s=for_s) else ""

    # ------------------------------------------------------------------ we connect

    async def _dial(self, pair: _Pair) -> Link:
        place = pair.place
        if place is None:
            raise Unavailable(f"{pair.node} is not connected, and where it is reached is not known")
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                pipe = await place.connect()
                try:
                    await self._secure(pair, pipe)
                    if (link := pair.channel.open_link) is not None:  # the peer was first
                        pipe.close("the peer has connected meanwhile")
                        return link
                    peer = await self._introduce(pair, pipe)
                except BaseException:
                    pipe.close("it was not let in")
                    raise
        except Refused as error:
            if str(error) == CROSSED and (link := await pair.channel.linked_within(CROSSED_S)) is not None:
                return link
            raise NotLetIn(f"{place} refused us: {error}") from None
        except BadInput as error:
            raise Unavailable(f"{place} cannot be reached: {error}") from None
        except ssl.SSLError as error:
            raise NotLetIn(f"{place} is not trusted: {_reason(error)}") from None
        except (OSError, Broken) as error:
            reason = _reason(error)
            if " alert " in reason:  # in TLS 1.3 the other side's verdict comes after our handshake has ended
                ours = self._credentials.certificate
                raise NotLetIn(f"{place} does not accept our certificate {ours}: {reason}") from None
            raise Unavailable(f"{place} cannot be reached: {reason}") from None
        link = pair.dialed = Link(pipe, pair.node, peer, self._find)
        return link

    async def _secure(self, pair: _Pair, pipe: Pipe) -> None:
        await pipe.secure(self._credentials.context(server=False), server=False)
        holder = Holder.of(pipe.peer_certificate)
        if holder.name != node_of(pair.node):
            raise Refused(f"its certificate names {holder.name!r}, and {node_of(pair.node)!r} is expected")

    async def _introduce(self, pair: _Pair, pipe: Pipe) -> Party:
        def refusal(peer: Party) -> str:
            return "" if peer.name == pair.node else f"it calls itself {peer.name!r}, and {pair.node!r} is expected"

        pair.dialing = True
        try:
            return await introduce(pipe, "", self._me, refusal)
        finally:
            pair.dialing = False


def _between_machines(address: str) -> TcpAddress:
    place = parse(address)
    if not isinstance(place, TcpAddress) or place.kind != "tls":
        raise BadInput("address", address, "`tls:host:port` is allowed between machines")
    return place


def _reason(error: Exception) -> str:
    return "it does not greet in time" if isinstance(error, TimeoutError) else said(error)
