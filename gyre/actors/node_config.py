"""What gyred is told in its file: who it is, where its folder is, which store, and how other nodes reach it.

[node]
name = "node-a"
dir = "/var/lib/gyre"
base = "/srv/job"                # where the relative paths of a job file start from
store = "etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/prod?ca=ca.pem&cert=node-a.pem&key=node-a.key"
address = "tls:10.0.0.11:7400"   # and all below: only where there are other nodes
cells = 1
ca = "ca.pem"
certificate = "node-a.pem"
key = "node-a.key"
snapshot_memory_mib = 16384      # of /dev/shm, for snapshots that other nodes made; 0: on disk
drain_s = 300                    # after SIGTERM, for the runs that live here to come to their end; 0: none
log_level = "info"               # debug, info, warning, error; read again at SIGHUP
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gyre.actors.address import TcpAddress, parse
from gyre.config import Name, Section, read_toml, validated
from gyre.credentials import Credentials
from gyre.errors import BadInput
from gyre.ids import NodeId
from gyre.jobdir import JobDir

SNAPSHOT_MEMORY_MIB = 16384
"""Two snapshots of 4 billion parameters in bfloat16 or of 2 billion in float32; what /dev/shm has not is not taken."""

DRAIN_S = 300.0


class _NodeSection(Section):
    name: Name
    dir: Path
    base: Path
    store: str
    address: str = ""
    cells: Annotated[int, Field(ge=0, le=64)] | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    snapshot_memory_mib: Annotated[int, Field(ge=0, le=16_777_216)] | None = None
    drain_s: Annotated[float, Field(ge=0, le=604_800, allow_inf_nan=False)] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("address")
    @classmethod
    def _between_machines(cls, value: str) -> str:
        try:
            place = parse(value) if value else None
        except BadInput:
            place = None
        if value and not (isinstance(place, TcpAddress) and place.kind == "tls" and place.port):
            raise ValueError("`tls:host:port` is allowed, with a port of 1 to 65535")
        return value

    @model_validator(mode="after")
    def _all_of_a_cluster_or_none(self) -> _NodeSection:
        given = {name: getattr(self, name) for name in ("address", "cells", "ca", "certificate", "key")}
        there = [name for name, value in given.items() if value not in (None, "")]
        if there and len(there) < len(given):
            lacking = ", ".join(name for name in given if name not in there)
            raise ValueError(f"{', '.join(there)} want {lacking} beside them")
        if bool(there) != self.store.startswith("etcd:"):
            raise ValueError("address, cells and certificates go with a store on etcd, which other nodes reach too")
        if self.snapshot_memory_mib is not None and not there:
            raise ValueError("snapshot_memory_mib is for snapshots of other nodes, and goes with a store on etcd")
        if self.drain_s is not None and not there:
            raise ValueError("drain_s is for a node among others, and goes with a store on etcd")
        return self


class _NodeFile(Section):
    node: _NodeSection


@dataclass(frozen=True)
class Membership:
    """What a node of a cluster has beside what a lone one has."""

    address: str
    """`tls:host:port`; the host is where its engines are reached too."""
    cells: int
    credentials: Credentials
    snapshot_memory_bytes: int
    """Of shared memory, for snapshots of other nodes; 0: they are on disk."""
    drain_s: float
    """After a signal to end, for the runs that live here to come to their end; 0: they begin again elsewhere at once."""

    @property
    def host(self) -> str:
        place = parse(self.address)
        assert isinstance(place, TcpAddress)
        return place.host


@dataclass(frozen=True)
class NodeConfig:
    name: NodeId
    job: JobDir
    base: Path
    store: str
    membership: Membership | None
    log_level: str = "info"

    @staticmethod
    def load(path: Path) -> NodeConfig:
        """Raises FileError, a line for each key that is wrong. Relative paths start from its folder.

        What it names is not looked at: that does gyre.actors.node_check.
        """
        section = validated(path, read_toml(path), _NodeFile).node
        folder = path.resolve().parent
        return NodeConfig(
            NodeId(section.name),
            JobDir(folder / section.dir),
            folder / section.base,
            section.store,
            _membership(section, folder),
            section.log_level,
        )

    def differs(self, other: NodeConfig) -> tuple[str, ...]:
        """The names of what is another there, but for the log's level: what a running gyred does not take over."""
        names = {"job": "dir", "membership": "address, cells, certificates, snapshot_memory_mib or drain_s"}
        found = (field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name))
        return tuple(names.get(name, name) for name in found if name != "log_level")

    def to_plain(self, job: JobDir) -> dict[str, str | int | float]:
        """What `load` reads, for a job of this node: every path is absolute, so that it means the same anywhere."""
        plain: dict[str, str | int | float] = {
            "name": self.name,
            "dir": str(job.root),
            "base": str(self.base),
            "store": self.store,
        }
        if (found := self.membership) is not None:
            held = found.credentials
            plain |= {"address": found.address, "cells": found.cells}
            plain |= {"snapshot_memory_mib": found.snapshot_memory_bytes >> 20, "drain_s": found.drain_s}
            plain |= {"ca": str(held.ca), "certificate": str(held.certificate), "key": str(held.key)}
        return plain


def _membership(section: _NodeSection, folder: Path) -> Membership | None:
    if not section.address:
        return None
    assert section.ca is not None
    assert section.certificate is not None
    assert section.key is not None
    assert section.cells is not None
    credentials = Credentials(folder / section.ca, folder / section.certificate, folder / section.key)
    mib = SNAPSHOT_MEMORY_MIB if section.snapshot_memory_mib is None else section.snapshot_memory_mib
    drain_s = DRAIN_S if section.drain_s is None else section.drain_s
    return Membership(section.address, section.cells, credentials, mib << 20, drain_s)
