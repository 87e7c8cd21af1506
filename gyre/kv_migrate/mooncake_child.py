"""`python -m gyre.kv_migrate.mooncake_child FD PROTOCOL HOST DEVICES`: one Transfer Engine, and nothing else.

The engine can crash, hold the interpreter for a minute, and write late; here that is this process' trouble alone, and to
kill it ends whatever it does. It is told what to do over the socket FD, one command after another, and dies with whoever
started it. It sees no memory but the staging memory that it is handed.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from gyre.wire import pack_any, record, unpack_any

COMMAND_BYTES = 128 << 10
_PR_SET_PDEATHSIG = 1


@record("mooncake_share")
@dataclass(frozen=True)
class Share:
    """Map and register the memory whose descriptor comes along. Answered with its address."""

    size: int


@record("mooncake_unshare")
@dataclass(frozen=True)
class Unshare:
    """Let go of the memory at this address. Its bytes can be read by nobody from then on."""

    place: int


@record("mooncake_read")
@dataclass(frozen=True)
class ReadRemote:
    """Read remote memory into ours: one batch of requests, each a place here, a place there, and a length."""

    engine: str
    requests: tuple[tuple[int, int, int], ...]


@record("mooncake_done")
@dataclass(frozen=True)
class Done:
    """`status` is the engine's (0: it went well), `place` that of shared memory, `engine` the name that peers reach it by."""

    status: int
    place: int = 0
    engine: str = ""


def main() -> None:
    descriptor, protocol, host, devices = sys.argv[1:5]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us
    commands = socket.socket(fileno=int(descriptor))
    # The engine is a foreign library without types: it is loaded by name, and only here.
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    status = int(engine.initialize(host, "P2PHANDSHAKE", protocol, devices))
    _answer(commands, Done(status, engine=f"{host}:{engine.get_rpc_port()}" if status == 0 else ""))
    regions = _Regions(engine)
    while status == 0:
        data, descriptors, _, _ = socket.recv_fds(commands, COMMAND_BYTES, 1)
        if not data:
            break
        _answer(commands, _carry_out(unpack_any(data), descriptors, engine, regions))
    os._exit(0)  # its threads are not waited for


def _carry_out(command: Any, descriptors: list[int], engine: Any, regions: _Regions) -> Done:
    match command:
        case Share(size):
            return regions.share(descriptors[0], size)
        case Unshare(place):
            return regions.unshare(place)
        case ReadRemote(peer, requests):
            here, there, lengths = (list(column) for column in zip(*requests, strict=True))
            return Done(int(engine.batch_transfer_sync_read(peer, here, there, lengths)))
        case other:
            raise TypeError(f"{type(other).__name__} is no command")


@dataclass
class _Regions:
    engine: Any
    shared: dict[int, mmap.mmap] = field(default_factory=dict[int, mmap.mmap])

    def share(self, descriptor: int, size: int) -> Done:
        region = mmap.mmap(descriptor, size)
        os.close(descriptor)
        place = ctypes.addressof(ctypes.c_char.from_buffer(region))
        status = int(self.engine.register_memory(place, size))
        if status == 0:
            self.shared[place] = region
        return Done(status, place)

    def unshare(self, place: int) -> Done:
        status = int(self.engine.unregister_memory(place))
        if status == 0:
            del self.shared[place]
        return Done(status)


def _answer(commands: socket.socket, done: Done) -> None:
    commands.send(pack_any(done))


if __name__ == "__main__":
    main()
