"""Which transport an engine uses: a pure function of what is configured and what the host has, and the look at the host.

    choice = choose("auto", host)
    print(choice.reason)      # "tcp: no RDMA device is active here"

It is decided once, before anything is opened, and said in the log. The Transfer Engine itself is no witness: without a
device it reports success and uses TCP.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gyre.errors import BadInput

_IMPORT_S = 60.0
_DEVICES = Path("/sys/class/infiniband")


class Kind(StrEnum):
    TCP = "tcp"
    MOONCAKE = "mooncake"
    """The Transfer Engine over RDMA."""
    MOONCAKE_TCP = "mooncake-tcp"
    """The Transfer Engine over its own TCP, which has neither authentication nor checksums: to try it out."""


AUTO = "auto"
WANTED = (AUTO, *Kind)


@dataclass(frozen=True)
class Host:
    """What a host has for moving bytes."""

    devices: tuple[str, ...]
    """RDMA devices with an active port."""
    mooncake_fault: str
    """Why the Transfer Engine cannot be loaded, with the mend; empty when it can."""


@dataclass(frozen=True)
class Choice:
    kind: Kind
    why: str
    devices: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """For the log and for `gyrectl node show`."""
        return f"{self.kind}: {self.why}"


def choose(wanted: str, host: Host) -> Choice:
    """The transport to use. Raises BadInput when what was asked for cannot be had: nothing else is used in its place."""
    asked = f"{wanted} was asked for"
    named = ", ".join(host.devices)
    match wanted:
        case "auto":
            if not host.devices:
                return Choice(Kind.TCP, "no RDMA device is active here")
            if host.mooncake_fault:
                return Choice(Kind.TCP, f"{named} is active and not used: {host.mooncake_fault}")
            return Choice(Kind.MOONCAKE, f"{named} is active", host.devices)
        case Kind.TCP:
            return Choice(Kind.TCP, asked)
        case Kind.MOONCAKE:
            if not host.devices:
                raise BadInput("transport", wanted, "it needs an RDMA device with an active port, and there is none")
            _need_mooncake(wanted, host)
            return Choice(Kind.MOONCAKE, f"{asked}, over {named}", host.devices)
        case Kind.MOONCAKE_TCP:
            _need_mooncake(wanted, host)
            return Choice(Kind.MOONCAKE_TCP, asked)
        case _:
            raise BadInput("transport", wanted, f"it must be one of {', '.join(WANTED)}")


def look(wanted: str, devices: Path = _DEVICES) -> Host:
    """What `choose` has to know for `wanted`. The Transfer Engine is only tried where it may be used."""
    active = active_devices(devices)
    may_use_it = bool(active) if wanted == AUTO else wanted in (Kind.MOONCAKE, Kind.MOONCAKE_TCP)
    return Host(active, mooncake_fault() if may_use_it else "it was not tried")


def active_devices(devices: Path = _DEVICES) -> tuple[str, ...]:
    """RDMA devices with an active port."""
    return tuple(sorted(device.name for device in devices.glob("*") if _is_active(device)))


def mooncake_fault() -> str:
    """Why the Transfer Engine cannot be loaded, or an empty string. It is loaded in a process of its own."""
    program = (sys.executable, "-c", "import mooncake.engine")
    try:
        tried = subprocess.run(program, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"mooncake was not loaded within {_IMPORT_S:g} s"
    return "" if tried.returncode == 0 else import_fault(tried.stderr, tried.returncode)


def import_fault(stderr: str, status: int) -> str:
    """One line from what Python said when it could not load mooncake: what was wrong, and the mend."""
    lines = stderr.strip().splitlines()
    said = lines[-1].partition(": ")[2] or lines[-1] if lines else f"exit status {status}"
    if "No module named" in said:
        mend = "pip install 'gyre[transfer]'"
    elif "cannot open shared object file" in said:
        library = said.partition(":")[0]
        mend = f"install it (Debian: libibverbs1 has libibverbs.so.1), or name the folder that has {library} in LD_LIBRARY_PATH"
    else:
        mend = "pip install --force-reinstall 'gyre[transfer]'"
    return f"mooncake cannot be loaded ({said}); {mend}"


def _need_mooncake(wanted: str, host: Host) -> None:
    if host.mooncake_fault:
        raise BadInput("transport", wanted, host.mooncake_fault)


def _is_active(device: Path) -> bool:
    """Whether a port of it is up, as the kernel tells ("4: ACTIVE")."""
    for state in device.glob("ports/*/state"):
        try:
            if state.read_text(encoding="ascii").strip().endswith("ACTIVE"):
                return True
        except (OSError, ValueError):
            continue
    return False
