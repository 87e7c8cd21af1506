"""A store for a URL, so that the same job runs on the embedded store and on a cluster's. Only the one that is named is loaded."""

from __future__ import annotations

from pathlib import Path

from gyre.errors import BadInput
from gyre.store.protocol import Store
from gyre.store.records import Keys

_ALLOWED = "sqlite:///absolute/path, sqlite:relative/path, memory:, or etcd://host:2379,host:2379/cluster"


def open_store(url: str, *, read_only: bool = False) -> Store:
    """The store at `url`. Raises BadInput for a URL that names none, StoreLocked when another process writes to it."""
    if url == "memory:":
        return _embedded(None)
    if url.startswith("etcd:"):
        return _etcd(url, read_only)
    return _embedded(sqlite_path(url), read_only)


def sqlite_path(url: str) -> Path:
    """The file of an embedded store. Raises BadInput for a URL that names none."""
    scheme, _, rest = url.partition(":")
    path = rest.removeprefix("//")
    if scheme != "sqlite" or not path or path.endswith("/"):
        raise BadInput("store url", url, f"give {_ALLOWED}")
    return Path(path)


def cluster_of(url: str) -> str | None:
    """The cluster that a store URL names; None for an embedded store, which holds one job's."""
    from gyre.store.etcd.address import EtcdAddress

    return EtcdAddress.parse(url).cluster if url.startswith("etcd:") else None


def keys_for(url: str, job: str) -> Keys:
    """Where a job has its records in the store at `url`: a cluster's store holds one job after the other."""
    cluster = cluster_of(url)
    return Keys(job if cluster is None else f"{cluster}/jobs/{job}")


def _embedded(path: Path | None, read_only: bool = False) -> Store:
    from gyre.store.embedded import EmbeddedStore

    return EmbeddedStore.open(path, read_only=read_only)


def _etcd(url: str, read_only: bool) -> Store:
    from gyre.store.etcd.address import EtcdAddress

    address = EtcdAddress.parse(url)
    try:
        from gyre.store.etcd.store import EtcdStore
    except ModuleNotFoundError as error:
        raise BadInput("store url", url, f"it needs {error.name}: pip install 'gyre[cluster]'") from error
    return EtcdStore(address, read_only=read_only)
