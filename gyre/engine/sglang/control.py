"""The client of an engine that is SGLang, for the cell that owns it. Sampling is as with any engine.

SGLang takes its owner's word: told to release its memory while it samples, it dies; told to update its weights then, it
does so and says afterwards that it could not. So this client looks first. To flush the cache is the question: it is
refused by the same rule that the release dies of, the copies of a hierarchical cache in progress included.
"""

from __future__ import annotations

from gyre.engine.client import EngineClient
from gyre.engine.records import EngineRefused


class SglangClient(EngineClient):
    """`idle_s` is how long what the engine is at the end of may take: a last step, or KV on its way to the host."""

    def __init__(self, url: str, *, key: str = "", idle_s: float = 10.0) -> None:
        super().__init__(url, key=key)
        self._idle_s = idle_s

    async def update_weights(self, path: str, version: int) -> None:
        """As any engine's; refused, with the old weights in place, while requests hold KV."""
        try:
            await self.flush_cache()
        except EngineRefused as refusal:
            if refusal.status != 400:
                raise
            await self._idle()
        await super().update_weights(path, version)

    async def release_memory(self) -> None:
        """Give weights and KV memory back; refused while there are requests, which go on.

        From then on new requests wait for `resume_memory`: SGLang would sample with what is no longer there.
        """
        await self._idle()
        await self.pause("abort")
        try:
            await self._idle()  # a request may have come between
        except EngineRefused:
            await self.resume()
            raise
        await super().release_memory()

    async def resume_memory(self) -> None:
        """Only after `release_memory`: SGLang dies of it otherwise."""
        await super().resume_memory()
        await self.resume()

    async def _idle(self) -> None:
        """Return when there is no request; else it is refused. The cache is empty then."""
        await self._post(f"/flush_cache?timeout={self._idle_s:g}", {})
