"""A cell's engine as a process: what is run, and how it is known to serve. Which one is the job file's choice.

Either kind ends with its address in `ready_file`, by which a later gyred finds it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from pathlib import Path

from gyre.actors.site import Site
from gyre.children import Child, ChildSpec
from gyre.engine.access import http_key
from gyre.engine.ports import free_port
from gyre.engine.sglang.command import command, environment, secret_options
from gyre.errors import GyreError, Unavailable
from gyre.kv_migrate.hicache_settings import HicacheSettings

LOCAL_START_S = 180.0
SGLANG_START_S = 570.0
"""Less than a stage of the cell may take."""
_POLL_S = 0.05
_ASK_S = 1.0


async def start(site: Site, name: str, place: int, model: Path, version: int, ready_file: Path) -> tuple[Child, str]:
    """Start an engine with the weights of `model`; the process, and its address once it serves.

    Raises Unavailable when it does not: the process, if it lives, is to be ended by its name.
    """
    ready_file.unlink(missing_ok=True)
    if site.spec.engine.kind == "sglang":
        return await _start_sglang(site, name, place, model, version, ready_file)
    return await _start_local(site, name, model, version, ready_file)


async def _start_local(site: Site, name: str, model: Path, version: int, ready_file: Path) -> tuple[Child, str]:
    cells, certificates = site.spec.cells, _certificates(site)
    argv = (
        *(sys.executable, "-m", "gyre.engine.local", "--model", str(model), "--version", str(version)),
        *("--ready-file", str(ready_file), "--secret-file", str(site.job.secret_file)),
        *("--threads", str(cells.threads), "--block-tokens", str(cells.block_tokens)),
        *("--cache-tokens", str(cells.cache_tokens), "--kv-transport", site.spec.engine.kv_transport),
        *("--host", site.host),
        *(("--certificates", *certificates) if certificates else ()),
    )
    log = site.job.logs / f"{name}.log"
    child = await site.children.start(ChildSpec(name, argv, log=log))
    try:
        async with asyncio.timeout(LOCAL_START_S):
            while not ready_file.exists():
                await _pause(child, log, _POLL_S)
    except TimeoutError:
        raise _late(LOCAL_START_S, log) from None
    return child, read_ready(ready_file)


async def _start_sglang(
    site: Site, name: str, place: int, model: Path, version: int, ready_file: Path
) -> tuple[Child, str]:
    spec, key = site.spec, http_key(site.secret)
    named = spec.engine.python
    secrets = site.job.state / f"{name}.yaml"
    secrets.touch(mode=0o600)
    secrets.write_text(secret_options(key), encoding="utf-8")
    port = free_port(site.host)
    argv = command(
        spec.engine,
        spec.cells,
        python=str(site.base / named) if "/" in named else named,
        model=model,
        version=version,
        host=site.host,
        port=port,
        secrets=secrets,
        place=place,
        kv=_kv_plugin(site) if spec.engine.moves_kv else None,
    )
    log = site.job.logs / f"{name}.log"
    child = await site.children.start(
        ChildSpec(name, argv, log=log, env=environment(spec.engine, spec.cells, os.environ))
    )
    url = f"http://{site.host}:{port}"
    client = site.outside.engine(url, key, spec.engine.kind)
    try:
        async with asyncio.timeout(SGLANG_START_S):
            while not await _serves(client.health()):
                await _pause(child, log, _ASK_S)
    except TimeoutError:
        raise _late(SGLANG_START_S, log) from None
    finally:
        await client.close()
    ready_file.write_text(json.dumps({"url": url}), encoding="utf-8")
    return child, url


def read_ready(ready_file: Path) -> str:
    """The engine's address. Raises OSError, ValueError or KeyError where the file does not say it."""
    return str(json.loads(ready_file.read_text(encoding="utf-8"))["url"])


def _kv_plugin(site: Site) -> HicacheSettings:
    orders = f"{site.host}:{free_port(site.host, site.spec.engine.tensor_parallel)}"
    return HicacheSettings(
        str(site.job.secret_file),
        orders,
        site.spec.job.name,
        _certificates(site),
        site.spec.engine.kv_transport,
        silence_s=site.spec.cells.kv_silence_s,
    )


def _certificates(site: Site) -> tuple[str, ...]:
    """By which KV blocks move to engines of other nodes."""
    held = site.credentials
    return () if held is None else (str(held.ca), str(held.certificate), str(held.key))


async def _pause(child: Child, log: Path, seconds: float) -> None:
    if not child.alive:
        raise Unavailable(f"the engine ended while it started; see {log}")
    await asyncio.sleep(seconds)


async def _serves(asking: Coroutine[None, None, None]) -> bool:
    try:
        await asking
    except GyreError:
        return False
    return True


def _late(limit_s: float, log: Path) -> Unavailable:
    return Unavailable(f"the engine was not ready within {limit_s:g} s; see {log}")
