"""One client for every sampling engine: SGLang's HTTP surface, as far as Gyre uses it.

The gateway generates and aborts through it; the cell pauses, loads weights and releases memory through it. A lost or
unreachable engine is `EngineGone`, an engine that says no is `EngineRefused`; nothing is retried here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

import orjson

from gyre.engine.events import EventReader
from gyre.engine.http import NoConnection, Origin
from gyre.engine.records import (
    Chunk,
    EngineAbsent,
    EngineGone,
    EngineInfo,
    EngineRefused,
    EngineUnreached,
    Finish,
    FinishKind,
    GenerateRequest,
    IdText,
    KvLack,
    KvPulled,
    Loads,
    PauseMode,
    StreamReader,
    VersionSpan,
    read_version,
)
from gyre.kv_migrate.manifest import Manifest

__all__ = [
    "Chunk",
    "EngineClient",
    "EngineGone",
    "EngineInfo",
    "EngineRefused",
    "Finish",
    "FinishKind",
    "GenerateRequest",
    "IdText",
    "KvLack",
    "KvPulled",
    "Loads",
    "PauseMode",
    "VersionSpan",
]

_LEFT_ALONE_S = 5.0
"""An engine that did not say soon enough what blocks it has is asked for none for so long."""


class EngineClient:
    """The engine at `url` (`http://127.0.0.1:port`). Close it, or use it as an async context manager.

    `key` is sent with every request; an engine that was started with one refuses those without it (401). `connect_s` bounds the wait for a connection, `silence_s` the wait for the next byte of an answer, `control_s` a
    whole control call.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        connect_s: float = 5.0,
        silence_s: float = 600.0,
        control_s: float = 120.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connect_s = connect_s
        self._origin = Origin(self.url, self._headers, connect_s)
        self._orders: Origin | None = None
        self._beside = False
        """Whether the orders go to our plug-in and not to the engine itself."""
        self._left_alone_until_s = 0.0
        self._silence_s = silence_s
        self._control_s = control_s

    @classmethod
    def of_orders(cls, url: str, key: str) -> Self:
        """A client of what takes orders about KV blocks at `url`, and does nothing else."""
        client = cls(url, key=key)
        client._orders, client._beside = client._origin, True
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._origin.close()
        if self._orders is not None:
            self._orders.close()

    # ------------------------------------------------------------------------------------------ sampling

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Sample; yields chunks of new tokens as they come. The last one has `finish`.

        Closing the generator early closes the connection, and the engine aborts the request.
        """
        events, reader = EventReader(), StreamReader()
        try:
            async with self._origin.ask("POST", "/generate", request.body(stream=True), self._silence_s) as answer:
                if answer.status != 200:
                    raise EngineRefused(answer.status, _error_text(await answer.whole()))
                while piece := await answer.piece():
                    for data in events.read(piece):
                        chunk = reader.read(_message(data))
                        answer.said_all = chunk.finish is not None
                        yield chunk
                        if answer.said_all:
                            return
        except (OSError, TimeoutError) as error:
            raise _gone(f"{self.url} was lost while it answered {request.rid}: {_say(error)}", error) from error
        raise EngineGone(f"{self.url} ended the answer to {request.rid} without a finish")

    async def abort(self, rid: str) -> None:
        """Stop one request at a token boundary; its stream ends with what it has. An unknown rid is no error."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    # ------------------------------------------------------------------------------------------ control

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling: `abort` ends all requests, `retract` drops their KV, `in_place` keeps it. New ones wait."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def update_weights(self, path: str, version: int) -> None:
        """Take the weights in folder `path` as `version`, and drop the cache. Refused while requests are sampled."""
        answer = await self._post(
            "/update_weights_from_disk", {"model_path": path, "weight_version": str(version), "flush_cache": True}
        )
        if not answer.get("success", True):
            raise EngineRefused(200, str(answer.get("message", answer)))

    async def release_memory(self) -> None:
        """Give weights and KV memory back. Only on an engine without requests: SGLang dies otherwise."""
        await self._post("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})

    async def resume_memory(self) -> None:
        await self._post("/resume_memory_occupation", {"tags": ["weights", "kv_cache"]})

    async def flush_cache(self) -> None:
        await self._post("/flush_cache", {})

    async def info(self) -> EngineInfo:
        answer = await self._get("/model_info")
        kv = cast("Mapping[str, Any]", answer["kv"]) if "kv" in answer else await self.kv_about()
        return EngineInfo(
            version=read_version(answer.get("weight_version")),
            model_path=str(answer.get("model_path", "")),
            kv_address=str(kv.get("address", "")),
            kv_layout=str(kv.get("layout", "")),
            block_tokens=int(kv.get("block_tokens", 0)),
            kv_epoch=int(kv.get("epoch", 0)),
            kv_model=str(kv.get("model", "")),
            kv_carrier=str(kv.get("carrier", "")),
        )

    async def loads(self) -> Loads:
        answer = await self._get("/v1/loads")
        ranks = cast("list[Mapping[str, Any]]", answer.get("loads") or [])
        return Loads(
            running=sum(int(rank.get("num_running_reqs", 0)) for rank in ranks),
            waiting=sum(int(rank.get("num_waiting_reqs", 0)) for rank in ranks),
        )

    async def health(self) -> None:
        """Returns when the engine serves; raises EngineGone or EngineRefused when it does not."""
        await self._get("/health")

    # ------------------------------------------------------------------------------------------ KV blocks

    async def kv_lack(self, token_ids: Sequence[int], version: int) -> KvLack:
        """Which whole blocks of the prefix the engine lacks. Refused (409) when it holds another version."""
        answer = await self._order("/kv/lack", {"token_ids": list(token_ids), "version": version})
        return KvLack(
            version=int(answer["version"]),
            layout=str(answer["layout"]),
            blocks=int(answer["blocks"]),
            missing=tuple(bytes.fromhex(text) for text in cast("list[str]", answer["missing"])),
        )

    async def kv_pull(self, source: str, manifest: Manifest, deadline_s: float, bytes_s: float = 0.0) -> KvPulled:
        """Have the engine pull blocks from the peer at `source` and commit them to its cache.

        At `bytes_s` where no request waits for them; what has no rate overtakes what has.
        """
        order = {"source": source, "manifest": manifest.to_json(), "deadline_s": deadline_s, "bytes_s": bytes_s}
        answer = await self._order("/kv/pull", order)
        return KvPulled(
            int(answer["blocks"]),
            int(answer["bytes"]),
            int(answer.get("damaged", 0)),
            float(answer["seconds"]),
            str(answer.get("reason", "")),
        )

    async def _order(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("POST", path, body, await self._takes_orders())

    async def _takes_orders(self) -> Origin:
        """Who takes orders about KV blocks: the engine itself, or with SGLang our plug-in beside it."""
        if self._orders is None:
            url = "" if "kv" in await self._get("/model_info") else orders_url(await self._get("/server_info"))
            self._orders, self._beside = Origin(url, self._headers, self._connect_s) if url else self._origin, bool(url)
        return self._orders

    async def kv_about(self) -> Mapping[str, Any]:
        """What our plug-in says of the blocks; empty where there is none. It is in the process that samples, and SGLang
        answers HTTP in another: the one may hang without the other."""
        orders = await self._takes_orders()
        return await self._call("GET", "/kv", None, orders) if self._beside else {}

    async def kv_source(self, silence_s: float) -> EngineInfo:
        """`info`, for a request that waits until its blocks have moved away from here.

        Raises EngineGone after `silence_s` without an answer, and from then on for a while without a question.
        """
        loop = asyncio.get_running_loop()
        if loop.time() < self._left_alone_until_s:
            raise EngineGone(f"{self.url} said nothing a moment ago and is left alone")
        try:
            async with asyncio.timeout(silence_s):
                return await self.info()
        except TimeoutError as error:
            self._left_alone_until_s = loop.time() + _LEFT_ALONE_S
            raise EngineGone(f"{self.url} said nothing for {silence_s:g} s") from error

    # ------------------------------------------------------------------------------------------ plumbing

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        origin: Origin | None = None,
    ) -> dict[str, Any]:
        data = () if body is None else (orjson.dumps(body),)
        origin = origin or self._origin
        try:
            async with asyncio.timeout(self._control_s), origin.ask(method, path, data) as answer:
                said = await answer.whole()
                if answer.status != 200:
                    raise EngineRefused(answer.status, _error_text(said))
        except (OSError, TimeoutError) as error:
            raise _gone(f"{method} {self.url}{path}: {_say(error)}", error) from error
        # Several of SGLang's control endpoints answer with nothing, null or plain text.
        try:
            value = orjson.loads(said) if said else {}
        except ValueError:
            return {}
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def orders_url(server_info: Mapping[str, Any]) -> str:
    """Where our plug-in (gyre.kv_migrate.hicache) takes orders, as SGLang's start-up options say; or an empty string."""
    try:
        config = orjson.loads(server_info.get("hicache_storage_backend_extra_config") or "{}")
    except ValueError:
        return ""
    orders = cast("dict[str, Any]", config).get("orders") if isinstance(config, dict) else None
    return f"http://{orders}" if isinstance(orders, str) else ""


def _message(data: bytes) -> dict[str, Any]:
    try:
        return orjson.loads(data)
    except ValueError as error:
        raise EngineGone(f"the engine's stream is not JSON: {data[:120]!r}") from error


def _gone(text: str, error: OSError) -> EngineGone:
    if isinstance(error, NoConnection):
        return EngineAbsent(text) if error.refused else EngineUnreached(text)
    return EngineGone(text)


def _error_text(said: bytes) -> str:
    """What the engine says went wrong, out of the forms SGLang has for it."""
    text = said.decode("utf-8", "replace")
    try:
        body = orjson.loads(said)
    except ValueError:
        return text[:500]
    if isinstance(body, dict):
        error = cast("dict[str, Any]", body).get("error", cast("dict[str, Any]", body).get("message", text))
        if isinstance(error, dict):
            error = cast("dict[str, Any]", error).get("message", text)
        return str(error)[:500]
    return text[:500]


def _say(error: BaseException) -> str:
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return "no answer in time"
    return str(error) or type(error).__name__
