"""How two peers know each other: by the job's secret on one machine, by their nodes' certificates between machines."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl

from gyre.credentials import Credentials, Holder
from gyre.errors import Refused
from gyre.kv_migrate.stream import Stream, TlsStream

_MAGIC = b"GYREKV02"
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class SharedSecret:
    """Each side proves that it knows the secret, which itself never travels.

    caller -> called   magic, nonce
    called -> caller   nonce, proof over both nonces
    caller -> called   proof over both nonces
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    async def accept(self, connection: socket.socket) -> Stream:
        stream = Stream(connection)
        hello = await stream.receive(len(_MAGIC) + _NONCE_BYTES)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise Refused("the peer does not speak this protocol")
        theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        await stream.send([memoryview(mine + self._proof(b"called", theirs, mine))])
        proof = await stream.receive(_PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"caller", theirs, mine)):
            raise Refused("the peer does not know the shared secret")
        return stream

    async def introduce(self, connection: socket.socket) -> Stream:
        stream = Stream(connection)
        mine = secrets.token_bytes(_NONCE_BYTES)
        await stream.send([memoryview(_MAGIC + mine)])
        answer = await stream.receive(_NONCE_BYTES + _PROOF_BYTES)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"called", mine, theirs)):
            raise Refused("the peer does not know the shared secret")
        await stream.send([memoryview(self._proof(b"caller", mine, theirs))])
        return stream

    def _proof(self, side: bytes, caller_nonce: bytes, called_nonce: bytes) -> bytes:
        return hmac.digest(self._secret, side + caller_nonce + called_nonce, hashlib.sha256)


class Certificates:
    """TLS, and both sides show the certificate of a node. Raises BadInput for files that cannot be used."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        for server in (False, True):
            credentials.context(server=server)  # said now, not at the first transfer

    async def accept(self, connection: socket.socket) -> Stream:
        return await self._greet(connection, server=True)

    async def introduce(self, connection: socket.socket) -> Stream:
        return await self._greet(connection, server=False)

    async def _greet(self, connection: socket.socket, *, server: bool) -> Stream:
        stream = TlsStream(connection, self._credentials.context(server=server), server=server)
        try:
            certificate = await stream.greet()
        except ssl.SSLError as error:
            raise Refused(f"the TLS greeting failed: {_said(error)}") from error
        if Holder.of(certificate).client:
            raise Refused("the peer's certificate is a person's, and not that of a node")
        return stream


def _said(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
