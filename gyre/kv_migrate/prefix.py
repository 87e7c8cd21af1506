"""Moving the KV of one prefix from an engine to another, so that the continued request does not compute it again.

The target says which whole blocks it lacks and pulls them from the source. Whatever goes wrong, nothing wrong is
cached: the report says why, and the target computes the prefix itself.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from gyre.engine.client import EngineClient, EngineInfo, KvPulled
from gyre.errors import GyreError
from gyre.kv_migrate.manifest import Manifest


@dataclass(frozen=True)
class MoveReport:
    """What moved. `reason` is empty, or says why the target lacks what it lacks."""

    blocks: int
    bytes: int
    tokens: int
    """Tokens of the prefix whose KV the target now need not compute because of this move."""
    seconds: float
    reason: str


async def move_prefix(
    source: EngineClient,
    target: EngineClient,
    token_ids: Sequence[int],
    version: int,
    deadline_s: float,
    bytes_s: float = 0.0,
    silence_s: float | None = None,
) -> MoveReport:
    """Bring the whole blocks of `token_ids` under `version` to `target`. Never raises for a failed move.

    At `bytes_s` where no request waits for it; a move without a rate overtakes those that have one. With `silence_s`, a
    source that does not say within that what it has is given up before the deadline.
    """
    started_s = time.monotonic()
    blocks = size = tokens = 0
    reason = ""
    try:
        async with asyncio.timeout(deadline_s):
            # An engine computes a prefix's last token in any case, and of a sampled one there is no KV yet.
            lack = await target.kv_lack(token_ids[:-1], version) if len(token_ids) > 1 else None
            if lack is not None and lack.missing:
                info = await source.kv_source(deadline_s if silence_s is None else silence_s)
                reason = _obstacle(source.url, info, version, lack.layout)
                if not reason:
                    left_s = max(0.001, deadline_s - (time.monotonic() - started_s))
                    manifest = Manifest(
                        uuid.uuid4().hex, info.kv_epoch, info.kv_model, version, lack.layout, lack.missing
                    )
                    pulled = await target.kv_pull(info.kv_address, manifest, left_s, bytes_s)
                    blocks, size = pulled.blocks, pulled.bytes
                    tokens = blocks * info.block_tokens
                    reason = pulled.reason or _left_out(len(lack.missing), pulled)
    except TimeoutError:
        reason = f"not done within {deadline_s:g} s"
    except GyreError as error:
        reason = str(error)
    return MoveReport(blocks, size, tokens, time.monotonic() - started_s, reason)


def _left_out(asked: int, pulled: KvPulled) -> str:
    """Why the target lacks some of the blocks, or an empty string."""
    gone = asked - pulled.blocks - pulled.damaged
    parts = [f"{gone} of {asked} blocks were gone or found no room"] if gone else []
    if pulled.damaged:
        parts.append(f"{pulled.damaged} of {asked} blocks arrived damaged")
    return "; ".join(parts)


def _obstacle(url: str, info: EngineInfo, version: int, layout: str) -> str:
    """Why the source's blocks cannot be those of the target, or an empty string."""
    if not info.kv_address:
        return f"{url} serves no KV blocks"
    if info.version != version:
        return f"{url} holds version {info.version}, and the prefix is of version {version}"
    if info.kv_layout != layout:
        return f"the layouts differ: {info.kv_layout} and {layout}"
    return ""
