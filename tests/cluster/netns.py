"""Hosts in network namespaces of their own, behind a router that is one too: a host can be cut off, both ways or one way.

    with Network.made(["a", "b"]) as network:
        subprocess.Popen([*network.hosts["a"].before, "some", "server"])
        network.cut(network.hosts["a"], Cut.DEAF)
        network.heal(network.hosts["a"])

Nothing leads out of it. A cut drops packets without a word, on the router, as a broken cable would.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache


class Cut(Enum):
    BOTH = "both ways"
    DEAF = "nothing comes in"
    MUTE = "nothing goes out"


@dataclass(frozen=True)
class Host:
    name: str
    namespace: str
    address: str
    port: str
    """The router's end of its cable."""

    @property
    def before(self) -> tuple[str, ...]:
        """What a command is started through, to run on it."""
        return ("nsenter", f"--net=/run/netns/{self.namespace}", "--")


@dataclass(frozen=True)
class Network:
    router: str
    hosts: dict[str, Host]

    @staticmethod
    @contextmanager
    def made(names: Sequence[str], mbit_s: int | None = None) -> Generator[Network]:
        """Namespaces are named after this process; they are gone afterwards, whatever happens.

        With `mbit_s`, each host sends, and is sent, that much at most.
        """
        mark = f"gyre{os.getpid()}"
        network = Network(
            f"{mark}-router",
            {name: Host(name, f"{mark}-{name}", f"10.77.{n}.2", f"p{n}") for n, name in enumerate(names, 1)},
        )
        try:
            network._make(mbit_s)
            yield network
        finally:
            for namespace in (network.router, *(host.namespace for host in network.hosts.values())):
                with suppress(subprocess.CalledProcessError):
                    _ip("netns", "del", namespace)

    def _make(self, mbit_s: int | None) -> None:
        _ip("netns", "add", self.router)
        for n, host in enumerate(self.hosts.values(), 1):
            _ip("netns", "add", host.namespace)
            _ip("-n", self.router, "link", "add", host.port, "type", "veth", "peer", "eth0", "netns", host.namespace)
            for namespace, device, address in (
                (self.router, host.port, f"10.77.{n}.1"),
                (host.namespace, "eth0", host.address),
            ):
                _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
                _ip("-n", namespace, "link", "set", device, "up")
                if mbit_s is not None:
                    _limit(namespace, device, mbit_s)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "route", "add", "default", "via", f"10.77.{n}.1")
        forward = ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        subprocess.run(["ip", "netns", "exec", self.router, *forward], check=True, capture_output=True, text=True)

    def cut(self, host: Host, how: Cut) -> None:
        if how is not Cut.DEAF:
            _ip("-n", self.router, "rule", "add", "iif", host.port, "blackhole")
        if how is not Cut.MUTE:
            _ip("-n", self.router, "route", "add", "blackhole", f"{host.address}/32")

    def heal(self, host: Host) -> None:
        for undo in (("rule", "del", "iif", host.port, "blackhole"), ("route", "del", "blackhole", host.address)):
            with suppress(subprocess.CalledProcessError):  # it was not cut so
                _ip("-n", self.router, *undo)


@cache
def why_not() -> str:
    """Why no such network can be made here; empty when it can."""
    try:
        with Network.made(["try"]) as network:
            network.cut(network.hosts["try"], Cut.BOTH)
            subprocess.run([*network.hosts["try"].before, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}".strip()
    return ""


def _limit(namespace: str, device: str, mbit_s: int) -> None:
    shape = ("tbf", "rate", f"{mbit_s}mbit", "burst", "256kb", "latency", "50ms")
    command = ("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)
    subprocess.run(command, check=True, capture_output=True, text=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
