"""The server-sent events of an answer, out of its bytes in whatever pieces they come. Pure."""

from __future__ import annotations

from gyre.engine.records import EngineGone

LONGEST_EVENT_BYTES = 64 * 1024 * 1024
_DONE = b"[DONE]"


class EventReader:
    """Gives the data of each event; what is no data (a comment, say) is passed over, and so is what follows `[DONE]`."""

    def __init__(self) -> None:
        self._pending = b""
        self._done = False

    def read(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in this piece. Raises EngineGone where one does not end at all."""
        if self._done:
            return []
        *events, self._pending = (self._pending + piece).split(b"\n\n")
        if len(self._pending) > LONGEST_EVENT_BYTES:
            raise EngineGone(f"an event of the engine's stream is longer than {LONGEST_EVENT_BYTES} bytes")
        found = [event[5:].strip() for event in events if event.startswith(b"data:")]
        if _DONE in found:
            self._done = True
            del found[found.index(_DONE) :]
        return found
