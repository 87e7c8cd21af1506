"""What a transfer is about: it travels in the control plane, from whoever moves a prefix to the peer that pulls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from gyre.errors import BadInput
from gyre.wire import record, to_plain, unpack


@record("kv_manifest")
@dataclass(frozen=True)
class Manifest:
    """What is asked for, and under which conditions it means the same on both sides."""

    transfer: str
    """A name of its own for every transfer."""
    epoch: int
    """The source's, as its engine reports it."""
    model: str
    """Which weights: two of equal version and layout need not be the same ones."""
    version: int
    layout: str
    blocks: tuple[bytes, ...]

    def to_json(self) -> dict[str, Any]:
        return {**to_plain(self), "blocks": [name.hex() for name in self.blocks]}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Manifest:
        """Raises BadInput."""
        try:
            plain = {**body, "blocks": [bytes.fromhex(name) for name in body["blocks"]]}
            return unpack(cast(bytes, msgpack.packb(plain)), Manifest)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise BadInput("manifest", body, f"it does not have that shape ({error})") from error
