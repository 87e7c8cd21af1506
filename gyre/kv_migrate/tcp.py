"""The transport over a TCP socket: mutual proof of the shared secret, one manifest, one offer, then the bytes.

    client                                   server
    hello: magic, nonce            ->
                                   <-        nonce, proof over both nonces
    proof over both nonces         ->
    manifest (msgpack)             ->
                                   <-        offer: size and checksum of each block, or a refusal
                                   <-        the blocks, one after another
    done                           ->        (the source lets go of the blocks)

The secret itself never travels. Bytes go from the source's memory to the socket and from the socket into the
receiver's buffer, without a copy in between. Everything here has a deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import xxhash

from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.kv_migrate.transport import BlockSource, DamagedBlock, Manifest, Received
from gyre.wire import pack, record, unpack

_log = logging.getLogger(__name__)

_MAGIC = b"GYREKV01"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_DONE = b"D"
_LENGTH = struct.Struct("!I")
_LONGEST_FRAME_BYTES = 16 * 1024 * 1024
_LARGEST_TRANSFER_BYTES = 4 * 1024**3
_GREET_S = 5.0
"""A peer that has not proved itself by then is cut off."""
_SERVE_S = 120.0
"""The longest a peer may hold blocks."""


@record("kv_offer")
@dataclass(frozen=True)
class Offer:
    """The source's answer to a manifest: size (0: not here) and xxh3 checksum of each block; or why not."""

    refusal: str
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]


class TcpTransport:
    """Serves and pulls blocks between peers that share `secret`. Open it with `open`, close it with `close`."""

    def __init__(self, secret: bytes, listener: socket.socket) -> None:
        self._secret = secret
        self._listener = listener
        self._host, self._port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        self._source: BlockSource | None = None
        self._strangers: set[str] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._serving = asyncio.create_task(self._serve(), name="kv-serve")

    @classmethod
    async def open(cls, secret: bytes, host: str = "127.0.0.1", port: int = 0) -> Self:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise BadInput("kv address", f"{host}:{port}", f"it must be free ({error.strerror})") from error
        listener.setblocking(False)
        return cls(secret, listener)

    def register(self, source: BlockSource) -> None:
        self._source = source

    def describe(self) -> str:
        return f"tcp:{self._host}:{self._port}"

    async def fence(self, grace_s: float) -> None:
        under_way = set(self._sending)
        if not under_way:
            return
        _, late = await asyncio.wait(under_way, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()

    # ------------------------------------------------------------------------------------------ receiving

    async def pull(self, address: str, manifest: Manifest, block_bytes: int, deadline_s: float) -> Received:
        host, port = _parse(address)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._pull(host, port, manifest, block_bytes)
        except TimeoutError as error:
            raise Unavailable(
                f"{address} did not send {len(manifest.blocks)} blocks within {deadline_s:g} s"
            ) from error
        except (OSError, EOFError) as error:
            raise Unavailable(f"{address} was lost during a transfer ({error})") from error

    async def _pull(self, host: str, port: int, manifest: Manifest, block_bytes: int) -> Received:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as peer:
            peer.setblocking(False)
            await loop.sock_connect(peer, (host, port))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._greet(peer)
            await _send_frame(peer, pack(manifest))
            offer = unpack(await _receive_frame(peer), Offer)
            if offer.refusal:
                raise Refused(offer.refusal)
            here = _check_offer(offer, manifest, block_bytes)
            staging = memoryview(bytearray(len(here) * block_bytes))
            await _receive_into(peer, staging)
            received: list[tuple[bytes, memoryview]] = []
            for place, index in enumerate(here):
                data = staging[place * block_bytes : (place + 1) * block_bytes]
                if xxhash.xxh3_64_intdigest(data) != offer.checksums[index]:
                    raise DamagedBlock(f"block {manifest.blocks[index].hex()} arrived damaged")
                received.append((manifest.blocks[index], data))
            await loop.sock_sendall(peer, _DONE)
            return Received(tuple(received))

    async def _greet(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        mine = secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(peer, _MAGIC + mine)
        answer = await _receive(peer, _NONCE_BYTES + _PROOF_BYTES)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"server", mine, theirs)):
            raise Refused("the peer does not know the shared secret")
        await loop.sock_sendall(peer, self._proof(b"client", mine, theirs))

    # ------------------------------------------------------------------------------------------ serving

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as peers:
            while True:
                try:
                    peer, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    # Out of descriptors: others may still be served, and a loop without a pause would eat the core.
                    _log.warning("no connection for KV could be accepted: %s", error)
                    await asyncio.sleep(0.1)
                    continue
                peers.create_task(self._attend(peer, str(address[0])), name="kv-peer")

    async def _attend(self, peer: socket.socket, address: str) -> None:
        with peer:
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                async with asyncio.timeout(_GREET_S):
                    known = await self._admit(peer)
                if not known:
                    self._refuse_stranger(address)
                    return
                await self._send_within(peer, _SERVE_S)
            except (OSError, EOFError, TimeoutError) as error:
                _log.info("a transfer to %s was cut off: %s", address, error or "too slow")
            except GyreError as error:
                _log.warning("a transfer to %s was refused: %s", address, error)
            except Exception:
                # One peer's transfer must not end the serving of the others.
                _log.exception("a transfer to %s failed", address)

    async def _admit(self, peer: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        hello = await _receive(peer, len(_MAGIC) + _NONCE_BYTES)
        if hello[: len(_MAGIC)] != _MAGIC:
            return False
        theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(peer, mine + self._proof(b"server", theirs, mine))
        proof = await _receive(peer, _PROOF_BYTES)
        return hmac.compare_digest(proof, self._proof(b"client", theirs, mine))

    async def _send_within(self, peer: socket.socket, limit_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            async with asyncio.timeout(limit_s):
                await self._send(peer)
        finally:
            self._sending.discard(task)

    async def _send(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        manifest = unpack(await _receive_frame(peer), Manifest)
        try:
            if self._source is None:
                raise Refused("this peer serves nothing")
            lease = await self._source.lease(manifest)
        except Refused as error:
            await _send_frame(peer, pack(Offer(str(error), (), ())))
            return
        try:
            blocks = lease.blocks
            await _send_frame(peer, pack(_offer(blocks)))
            for block in blocks:
                if block is not None:
                    await loop.sock_sendall(peer, block)
            await _receive(peer, len(_DONE))
        finally:
            lease.end()

    def _refuse_stranger(self, address: str) -> None:
        if address not in self._strangers:
            self._strangers.add(address)
            _log.warning("%s asked for KV blocks without knowing the shared secret; refused (said once)", address)

    def _proof(self, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
        return hmac.digest(self._secret, side + client_nonce + server_nonce, hashlib.sha256)


def _offer(blocks: Sequence[memoryview | None]) -> Offer:
    return Offer(
        refusal="",
        sizes=tuple(0 if block is None else len(block) for block in blocks),
        checksums=tuple(0 if block is None else xxhash.xxh3_64_intdigest(block) for block in blocks),
    )


def _check_offer(offer: Offer, manifest: Manifest, block_bytes: int) -> list[int]:
    """The places in the manifest of the blocks that will come."""
    if not len(offer.sizes) == len(offer.checksums) == len(manifest.blocks):
        raise Refused(f"the offer is for {len(offer.sizes)} blocks, not {len(manifest.blocks)}")
    here = [index for index, size in enumerate(offer.sizes) if size]
    for index in here:
        if offer.sizes[index] != block_bytes:
            raise Refused(f"a block of {offer.sizes[index]} bytes is offered, not {block_bytes}")
    if len(here) * block_bytes > _LARGEST_TRANSFER_BYTES:
        raise Refused(f"a transfer of {len(here) * block_bytes} bytes is over the limit {_LARGEST_TRANSFER_BYTES}")
    return here


def _parse(address: str) -> tuple[str, int]:
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal():
        raise BadInput("kv address", address, "tcp:HOST:PORT is expected")
    return host, int(port)


async def _send_frame(peer: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(peer, _LENGTH.pack(len(data)) + data)


async def _receive_frame(peer: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(await _receive(peer, _LENGTH.size))
    if length > _LONGEST_FRAME_BYTES:
        raise Refused(f"a frame of {length} bytes is over the limit {_LONGEST_FRAME_BYTES}")
    return await _receive(peer, length)


async def _receive(peer: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    await _receive_into(peer, memoryview(buffer))
    return bytes(buffer)


async def _receive_into(peer: socket.socket, buffer: memoryview) -> None:
    loop = asyncio.get_running_loop()
    filled = 0
    while filled < len(buffer):
        count = await loop.sock_recv_into(peer, buffer[filled:])
        if count == 0:
            raise EOFError(f"the connection ended after {filled} of {len(buffer)} bytes")
        filled += count
