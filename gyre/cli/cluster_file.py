"""How a person reaches a cluster from any machine: what `gyrectl --cluster FILE` reads.

[cluster]
store = "etcd://10.0.0.1:2379,10.0.0.2:2379/prod?ca=/home/ada/ca.pem&cert=/home/ada/ada.pem&key=/home/ada/ada.key"
ca = "ca.pem"
certificate = "ada.pem"          # gyrectl pki issue ada --client
key = "ada.key"
node = "node-a"                  # ask this one, and no other; without it the leader's, or any that answers
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import field_validator

from gyre.actors.node_check import check_credentials, check_store
from gyre.actors.node_config import Membership, NodeConfig
from gyre.config import FileError, Name, Section, read_toml, validated
from gyre.credentials import Credentials
from gyre.errors import BadInput
from gyre.store.open import cluster_of


class _ClusterSection(Section):
    store: str
    ca: Path
    certificate: Path
    key: Path
    node: Name | None = None

    @field_validator("store")
    @classmethod
    def _on_etcd(cls, value: str) -> str:
        if not value.startswith("etcd:"):
            raise ValueError("a cluster's store is on etcd: etcd://host:2379,host:2379/cluster, as in its node.toml")
        return value


class _File(Section):
    cluster: _ClusterSection


@dataclass(frozen=True)
class ClusterFile:
    path: Path
    store: str
    credentials: Credentials
    node: str | None = None
    """The only one that is asked."""

    @staticmethod
    def load(path: Path) -> ClusterFile:
        """Fit to be used. Raises FileError, a line for each key that is wrong. Relative paths start from its folder."""
        section = validated(path, read_toml(path), _File).cluster
        folder = path.resolve().parent
        held = Credentials(folder / section.ca, folder / section.certificate, folder / section.key)
        if faults := check_store("cluster.store", section.store) + check_credentials("cluster", held, None):
            raise FileError(path, faults)
        return ClusterFile(path, section.store, held, section.node)

    @property
    def cluster(self) -> str:
        """Its name."""
        found = cluster_of(self.store)
        assert found is not None
        return found


def member(path: Path) -> tuple[NodeConfig, Membership]:
    """The node in a node's file, which is one of a cluster. Raises BadInput for one that is alone."""
    config = NodeConfig.load(path)
    if config.membership is None:
        raise BadInput("--node", str(path), "a node of a cluster (node.store on etcd); gyrectl up runs a job alone")
    return config, config.membership


def seen_from(path: Path) -> ClusterFile:
    """The cluster as the node in a node's file sees it: to read from its store, and to ask under the node's name."""
    config, membership = member(path)
    return ClusterFile(path, config.store, membership.credentials)
