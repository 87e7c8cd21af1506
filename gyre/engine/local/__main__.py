"""`python -m gyre.engine.local --model DIR --version N`: one engine process. SIGTERM ends it cleanly.

When it serves it writes `--ready-file` (JSON: port, pid, url, kv_address). `--secret-file` holds the job's
secret: only who knows it may pull KV blocks, and only who has a key of it (gyre.engine.access) may use the HTTP surface.
Without it the surface is open, and none move. Between machines `--certificates` takes the secret's place for KV blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.engine.local.shape import read_shape
from gyre.engine.unheard import end_unheard
from gyre.errors import BadInput, GyreError
from gyre.kv_migrate.choice import AUTO, WANTED

if TYPE_CHECKING:
    from gyre.engine.local.sampling import Sampler

_DTYPES = ("float32", "bfloat16")
_SHUTDOWN_S = 5.0


def main(sampler: Sampler | None = None) -> int:
    """Serve until SIGTERM. `sampler` stands in for the model's own choice of tokens."""
    options = _options()
    try:
        # torch takes seconds to import: what is wrong with the options is said before.
        read_shape(Path(options.model))
        secret = _secret(Path(options.secret_file)) if options.secret_file else None
        asyncio.run(_serve(options, secret, _listen(options.host, options.port), sampler))
    except GyreError as error:
        print(f"gyre.engine.local: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(
    options: argparse.Namespace, secret: bytes | None, listener: socket.socket, sampler: Sampler | None
) -> None:
    import torch
    from aiohttp import web

    from gyre.credentials import Credentials
    from gyre.engine.access import http_key
    from gyre.engine.local.core import EngineConfig, EngineCore
    from gyre.engine.local.kv_exchange import KvExchange
    from gyre.engine.local.sampling import sample
    from gyre.engine.local.server import EngineServer
    from gyre.kv_migrate.greeting import Certificates, SharedSecret
    from gyre.kv_migrate.opening import open_transport

    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: ended.done() or ended.set_result(None))
    core = EngineCore(
        EngineConfig(
            model=Path(options.model).resolve(),
            version=options.version,
            block_tokens=options.block_tokens,
            cache_tokens=options.cache_tokens,
            max_running=options.max_running,
            dtype=getattr(torch, options.dtype),
        ),
        sampler or sample,
    )
    exchange = None
    if secret is not None:
        certificates = options.certificates
        greeting = Certificates(Credentials(*map(Path, certificates))) if certificates else SharedSecret(secret)
        transport, carrier = await open_transport(options.kv_transport, greeting, options.kv_host or options.host)
        exchange = KvExchange(transport, carrier)
        print(f"KV blocks move over {carrier}", flush=True)
    server = EngineServer(core, exchange, http_key(secret.decode()).encode() if secret else b"")
    runner = web.AppRunner(
        server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    site = web.SockSite(runner, listener)
    await site.start()
    port = int(listener.getsockname()[1])
    url = f"http://{options.host}:{port}"
    if options.ready_file:
        ready = {"port": port, "pid": os.getpid(), "url": url, "kv_address": exchange.address if exchange else ""}
        _write_whole(Path(options.ready_file), json.dumps(ready))
    print(f"serving version {core.version} of {core.model_path} at {url}", flush=True)
    try:
        await asyncio.wait([ended, server.thread.failed], return_when=asyncio.FIRST_COMPLETED)
        if server.thread.failed.done():
            await server.thread.failed
    finally:
        await site.stop()
        await server.close()
        await runner.cleanup()
        if exchange is not None:
            await exchange.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gyre.engine.local", description="The local sampling engine.")
    parser.add_argument("--model", required=True, help="a folder in Hugging Face's layout")
    parser.add_argument("--version", type=_at_least(0), required=True, help="the version of its weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_at_least(0), default=0, help="0 takes a free one")
    parser.add_argument("--ready-file", default="", help="written, whole, when the engine serves")
    parser.add_argument("--secret-file", default="", help="the secret that clients and peers must know")
    parser.add_argument("--kv-host", default="", help="the address for KV blocks, where other machines reach it")
    parser.add_argument("--kv-transport", choices=WANTED, default=AUTO, help="what carries KV blocks")
    parser.add_argument("--certificates", nargs=3, metavar=("CA", "CERTIFICATE", "KEY"), help="of this node")
    parser.add_argument("--threads", type=_at_least(1), default=1)
    parser.add_argument("--block-tokens", type=_at_least(1), default=16)
    parser.add_argument("--cache-tokens", type=_at_least(32), default=65536)
    parser.add_argument("--max-running", type=_at_least(1), default=64, help="sequences in one batch")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    options = parser.parse_args()
    if options.cache_tokens < 2 * options.block_tokens:
        parser.error("--cache-tokens: at least two blocks are needed")
    return options


def _at_least(least: int):
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is not allowed; {least} or more")
        return value

    return number


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end_unheard(listener)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise BadInput("--port", f"{host}:{port}", f"it must be free ({error.strerror})") from error
    listener.setblocking(False)
    return listener


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise BadInput("--secret-file", str(path), f"it must be readable ({error.strerror})") from error
    if len(secret) < 16:
        raise BadInput("--secret-file", str(path), "at least 16 bytes are expected in it")
    return secret


def _write_whole(path: Path, text: str) -> None:
    """Write so that a reader sees the whole file or none."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. Taking torch apart module by module would only keep whoever ends us waiting.
    os._exit(status)
