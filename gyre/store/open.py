"""A store for a URL, so that the same job runs on the embedded store and on a cluster's."""

from __future__ import annotations

from pathlib import Path

from gyre.errors import BadInput
from gyre.store.embedded import EmbeddedStore
from gyre.store.protocol import Store

_ALLOWED = "sqlite:///absolute/path, sqlite:relative/path, or memory:"


def open_store(url: str, *, read_only: bool = False) -> Store:
    """The store at `url`. Raises BadInput for a URL that names none, StoreLocked when another process writes to it."""
    if url == "memory:":
        return EmbeddedStore.open(None)
    scheme, _, rest = url.partition(":")
    path = rest.removeprefix("//")
    if scheme != "sqlite" or not path or path.endswith("/"):
        raise BadInput("store url", url, f"give {_ALLOWED}")
    return EmbeddedStore.open(Path(path), read_only=read_only)
