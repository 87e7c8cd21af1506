"""A Transfer Engine in a process of its own, as the transport sees it: commands with a deadline, and an end that is final.

Any failure ends it: after an error an engine may still write, or have lost the way to a peer for good. Whoever needs one
starts the next.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from gyre.errors import Unavailable
from gyre.kv_migrate.choice import Kind, import_fault
from gyre.kv_migrate.mooncake_child import COMMAND_BYTES, Done, ReadRemote, Share, Unshare
from gyre.kv_migrate.staging import Staging
from gyre.wire import pack_any, unpack_any

_START_S = 30.0
_SHARE_S = 10.0
_GONE_S = 10.0
"""For the kernel to end what was killed."""

_SETTINGS = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "3",
    "MC_DISABLE_METACACHE": "1",
}
"""Short time-outs of its own, so that it often notices before our deadline; and a peer that restarted is met anew."""


class EngineProcess:
    """Started by `start`. Commands are carried out one after another."""

    def __init__(self, process: subprocess.Popen[str], commands: socket.socket, name: str) -> None:
        self._process = process
        self._commands = commands
        self._turn = asyncio.Lock()
        self.name = name
        """How peers reach it."""

    @classmethod
    async def start(cls, kind: Kind, host: str, devices: Sequence[str]) -> EngineProcess:
        """Raises Unavailable, with the mend when the library cannot be loaded."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        protocol = "rdma" if kind is Kind.MOONCAKE else "tcp"
        argv = (sys.executable, "-m", "gyre.kv_migrate.mooncake_child")
        with theirs:
            process = subprocess.Popen(
                (*argv, str(theirs.fileno()), protocol, host, ",".join(devices)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=_environment(kind),
                text=True,
            )
        ours.setblocking(False)
        engine = cls(process, ours, "")
        try:
            async with asyncio.timeout(_START_S):
                done = await engine._receive()
        except (TimeoutError, EOFError, OSError) as error:
            raise Unavailable(await engine._why_not_started()) from error
        except BaseException:
            engine.kill()
            raise
        if done.status != 0:
            engine.kill()
            raise Unavailable(f"the Transfer Engine did not start on {host} (status {done.status})")
        engine.name = done.engine
        return engine

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def share(self, staging: Staging) -> int:
        """Register staging memory: its address over there."""
        descriptor = os.dup(staging.fd)  # the staging memory may be gone before this is carried out
        try:
            return (await self._order(Share(staging.size), _SHARE_S, descriptor)).place
        finally:
            os.close(descriptor)

    async def unshare(self, place: int) -> None:
        await self._order(Unshare(place), _SHARE_S)

    async def read(self, engine: str, requests: tuple[tuple[int, int, int], ...], deadline_s: float) -> None:
        """One batch. Raises Unavailable when it did not go well or took too long; the engine is dead then."""
        await self._order(ReadRemote(engine, requests), deadline_s)

    def kill(self) -> None:
        """When this returns it reads and writes nothing any more."""
        self._process.kill()
        self._process.wait(_GONE_S)
        if not self._turn.locked():  # else who waits for its answer hears of its end, and does this
            self._close()

    def _close(self) -> None:
        self._commands.close()
        if self._process.stderr is not None:
            self._process.stderr.close()

    async def _order(self, command: Share | Unshare | ReadRemote, deadline_s: float, descriptor: int = -1) -> Done:
        what, well = type(command).__name__, False
        async with self._turn:
            if not self.alive:
                raise Unavailable("the Transfer Engine has ended")
            try:
                async with asyncio.timeout(deadline_s):
                    socket.send_fds(self._commands, [pack_any(command)], [] if descriptor < 0 else [descriptor])
                    done = await self._receive()
                if done.status != 0:
                    raise Unavailable(f"the Transfer Engine failed: {what} gave {done.status}")
            except TimeoutError as error:
                raise Unavailable(f"the Transfer Engine did not finish: {what} within {deadline_s:.3g} s") from error
            except (OSError, EOFError) as error:
                raise Unavailable(f"the Transfer Engine died: {what} ({error})") from error
            else:
                well = True
                return done
            finally:
                if not well:  # also when cancelled: it must not go on
                    self.kill()
                    self._close()

    async def _receive(self) -> Done:
        data = await asyncio.get_running_loop().sock_recv(self._commands, COMMAND_BYTES)
        if not data:
            raise EOFError("it closed its end")
        done = unpack_any(data)
        assert isinstance(done, Done)
        return done

    async def _why_not_started(self) -> str:
        self._process.kill()
        status = self._process.wait(_GONE_S)
        said = "" if self._process.stderr is None else self._process.stderr.read()
        self.kill()
        return import_fault(said, status)


def _environment(kind: Kind) -> Mapping[str, str]:
    """Ours and the engine's settings; MC_FORCE_TCP, or the engine takes RDMA where it finds a device."""
    forced = {"MC_FORCE_TCP": "1"} if kind is Kind.MOONCAKE_TCP else {}
    return {**{key: value for key, value in os.environ.items() if key != "MC_TCP_PROTO"}, **_SETTINGS, **forced}
