"""TLS over memory: bytes from the wire in, bytes for the wire out. Used by gyre.actors.pipe.

asyncio's own TLS does not send the alert that says why a certificate is not accepted, and the other side shall know.
"""

from __future__ import annotations

import ssl

_READ_BYTES = 256 * 1024


class Tls:
    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self.greeted = False

    def greet(self) -> bool:
        """A part of the handshake; True when it is complete. Raises ssl.SSLError, with an alert to be sent."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self.greeted = True
        return True

    @property
    def peer_certificate(self) -> dict[str, object]:
        return dict(self._object.getpeercert() or {})

    def feed(self, data: bytes | bytearray) -> None:
        """From the wire."""
        self._incoming.write(data)

    def opened(self) -> bytes:
        """What the other side has said since the last time. Raises ssl.SSLError, also for its alert."""
        parts: list[bytes] = []
        try:
            while part := self._object.read(_READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)

    def seal(self, data: bytes) -> None:
        """To be said to the other side."""
        view = memoryview(data)
        while view:
            view = view[self._object.write(view) :]

    def out(self) -> bytes:
        """For the wire."""
        return self._outgoing.read()
