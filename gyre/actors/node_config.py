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
log_level = "info"               # debug, info, warning, error; read again at SIGHUP
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gyre.actors.address import TcpAddress, parse
from gyre.config import Name
from gyre.credentials import Credentials
from gyre.errors import BadInput, GyreError
from gyre.ids import NodeId
from gyre.jobdir import JobDir


class _NodeSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    dir: Path
    base: Path
    store: str
    address: str = ""
    cells: Annotated[int, Field(ge=0, le=64)] | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _all_of_a_cluster_or_none(self) -> _NodeSection:
        given = {name: getattr(self, name) for name in ("address", "cells", "ca", "certificate", "key")}
        there = [name for name, value in given.items() if value not in (None, "")]
        if there and len(there) < len(given):
            lacking = ", ".join(name for name in given if name not in there)
            raise ValueError(f"{', '.join(there)} want {lacking} beside them")
        if bool(there) != self.store.startswith("etcd:"):
            raise ValueError("address, cells and certificates go with a store on etcd, which other nodes reach too")
        return self


class _NodeFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    node: _NodeSection


@dataclass(frozen=True)
class Membership:
    """What a node of a cluster has beside what a lone one has."""

    address: str
    """`tls:host:port`; the host is where its engines are reached too."""
    cells: int
    credentials: Credentials

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
        """Raises BadInput, naming the key, for a file that cannot be used. Relative paths start from its folder."""
        try:
            section = _NodeFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).node
        except OSError as error:
            raise BadInput("--config", str(path), f"it must be a file that can be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput("--config", str(path), f"it must be TOML ({error})") from error
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            shown = first["input"] if first["type"] != "value_error" else path.name
            raise BadInput(key, shown, first["msg"].removeprefix("Value error, ")) from error
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
        names = {"job": "dir", "membership": "address, cells or certificates"}
        found = (field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name))
        return tuple(names.get(name, name) for name in found if name != "log_level")

    def to_plain(self, job: JobDir) -> dict[str, str | int]:
        """What `load` reads, for a job of this node: every path is absolute, so that it means the same anywhere."""
        plain: dict[str, str | int] = {
            "name": self.name,
            "dir": str(job.root),
            "base": str(self.base),
            "store": self.store,
        }
        if (found := self.membership) is not None:
            held = found.credentials
            plain |= {"address": found.address, "cells": found.cells}
            plain |= {"ca": str(held.ca), "certificate": str(held.certificate), "key": str(held.key)}
        return plain


def _membership(section: _NodeSection, folder: Path) -> Membership | None:
    if not section.address:
        return None
    assert section.ca is not None
    assert section.certificate is not None
    assert section.key is not None
    assert section.cells is not None
    try:
        place = parse(section.address)
    except GyreError as error:
        raise BadInput("node.address", section.address, f"`tls:host:port` is allowed ({error})") from error
    if not isinstance(place, TcpAddress) or place.kind != "tls" or not place.port:
        raise BadInput("node.address", section.address, "`tls:host:port` is allowed")
    credentials = Credentials(folder / section.ca, folder / section.certificate, folder / section.key)
    return Membership(section.address, section.cells, credentials)
