"""gyred as a service of systemd: the few words that its manager understands, over the socket in $NOTIFY_SOCKET.

    service = Service.of(os.environ)     # says nothing to anybody where there is no such socket
    service.ready("waits for a job")

What is said is never waited for: a manager that does not listen must not hold a node up.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress


class Service:
    """`watchdog_s` is how long the manager waits for a sign of life; 0 when it waits for none."""

    def __init__(self, address: str, watchdog_s: float = 0.0) -> None:
        # A name that begins with @ is one of the kernel's own, in no folder.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._ready = False

    @staticmethod
    def of(environment: MutableMapping[str, str]) -> Service:
        """By the variables that a manager sets. They are taken out, for they are not meant for our children."""
        address = environment.pop("NOTIFY_SOCKET", "")
        usec, pid = environment.pop("WATCHDOG_USEC", "0"), environment.pop("WATCHDOG_PID", "")
        ours = pid in ("", str(os.getpid())) and usec.isdecimal()
        return Service(address, int(usec) / 1e6 if ours else 0.0)

    def ready(self, status: str) -> None:
        """What was begun is done: the start, or a reload."""
        self._ready = True
        self._say("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """The line that `systemctl status` shows."""
        self._say(f"STATUS={status}")

    def reloading(self) -> None:
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """What was ready before is so again; a start that is not done yet is not done by this."""
        if self._ready:
            self._say("READY=1")

    def stopping(self, status: str, within_s: float) -> None:
        """The end has begun; a manager that would kill sooner is asked for that long."""
        self._say("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}", f"STATUS={status}")

    async def show_life(self) -> None:
        """For ever, from the event loop that does the work: one that hangs shows none."""
        while self._watchdog_s:
            self._say("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _say(self, *lines: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._address)
