"""`gyred`: the light daemon of a node. It owns the node's actors and child processes, and computes nothing itself.

    gyred --config node.toml

Signals: SIGTERM and SIGINT end it. In a cluster they are a drain: its queued runs are taken by others, live ones have
node.drain_s (300 s) to come to their end, what its engines have of other nodes' runs goes on there with its KV, and a second
one ends it at once. At SIGHUP it reads its file again and takes over the log's level. Under systemd it says when it is ready, and what it does (gyre.service).

Exit codes: 0 the job ended or gyred was told to stop; 2 bad input; 3 the job or the node's name has a gyred that
lives; anything else is a crash, after which the next gyred adopts the children that this one left.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from gyre import __version__
from gyre.actors.daemon import run_node
from gyre.actors.node_check import load_node
from gyre.actors.node_config import NodeConfig
from gyre.errors import BadInput, GyreError, NameTaken
from gyre.service import Service
from gyre.store.protocol import StoreLocked

TAKEN = 3
_M_MMAP_THRESHOLD, _BIG_BYTES = -3, 128 * 1024
_M_ARENA_MAX, _ARENAS = -8, 1


def main(argv: list[str] | None = None) -> int:
    """The console script."""
    parser = argparse.ArgumentParser(
        prog="gyred",
        description="The daemon of one Gyre node.",
        epilog="SIGTERM drains a node of a cluster (node.drain_s, 300 s by default) and ends it; a second one ends it at once. "
        "SIGHUP reads the file again. docs/operations.md has more.",
    )
    parser.add_argument("--config", type=Path, required=True, metavar="NODE.toml", help="the node's configuration")
    parser.add_argument("--version", action="version", version=f"gyred {__version__}")
    args = parser.parse_args(argv)
    _give_memory_back()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    try:
        asyncio.run(_run(args.config, Service.of(os.environ)))
    except (StoreLocked, NameTaken) as error:
        logging.getLogger("gyred").error("%s", error)
        return TAKEN
    except BadInput as error:
        for line in str(error).splitlines():
            logging.getLogger("gyred").error("%s", line)
        return 2
    except GyreError as error:
        logging.getLogger("gyred").error("%s", error)
        return 1
    return 0


async def _run(file: Path, service: Service) -> None:
    config = load_node(file)
    logging.getLogger().setLevel(config.log_level.upper())
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: _reload(config, file, service))
    await run_node(config, service)


def _reload(begun: NodeConfig, file: Path, service: Service) -> None:
    """Take over what may change while the node runs, and say what else has changed since it was `begun`."""
    service.reloading()
    try:
        now = load_node(file)
    except BadInput as error:
        line = f"not reloaded, all stays as it was: {'; '.join(str(error).splitlines())}"
    else:
        logging.getLogger().setLevel(now.log_level.upper())
        line = f"reloaded: the log's level is {now.log_level}; certificates are read at each connection"
        if waits := begun.differs(now):
            line += f"; {', '.join(waits)} changed, which needs a restart"
    logging.getLogger("gyred").log(max(logging.INFO, logging.getLogger().level), "%s", line)  # shown whatever the level
    service.reloaded()


def _give_memory_back() -> None:
    """Have a big buffer's memory go back to the system when it is freed: glibc else learns to keep as much as the biggest
    message so far took, and each thread of grpc a heap of its own, though they hardly work at the same time."""
    with suppress(AttributeError):  # another C library has no such thing, and needs none
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _BIG_BYTES)
        library.mallopt(_M_ARENA_MAX, _ARENAS)


if __name__ == "__main__":
    sys.exit(main())
