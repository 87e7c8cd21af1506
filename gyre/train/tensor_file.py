# pyright: basic
"""Tensors in safetensors files: written with the disk's own errors, and read out of the mapped file, checked on the way."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gyre.errors import BadInput
from gyre.train.whole_folder import CHUNK_BYTES, chunk_checksum

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises OSError: a disk that is full is ENOSPC, whatever the library makes of it."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if f"os error {errno.ENOSPC})" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path.name) from error
        raise OSError(errno.EIO, f"{path.name} could not be written ({error})") from error


class ChunkChanged(Exception):
    """A chunk of a file does not have its checksum."""


@dataclass(frozen=True)
class MappedTensor:
    name: str
    values: Tensor
    """A view of the file; not to be written to."""
    begin: int
    """Its first byte in the file."""


class MappedFile:
    """A safetensors file, mapped: `tensors` in the order in which they lie in it, nothing of them read yet.

    With `checksums`, those of its chunks, `check_until` checks each `share[1]`-th chunk from `share[0]` on as the reader comes to
    it, while it is in the processor's cache anyway. What the tensors are is checked at once. Raises BadInput for a file
    that is not one, ChunkChanged, and OSError.
    """

    def __init__(self, path: Path, checksums: Sequence[str] = (), share: tuple[int, int] = (0, 1)) -> None:
        self.name = path.name
        self._checksums = checksums
        self._share = share
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise BadInput("model weights", path.name, "the file is empty")
            # private, so that torch takes it for writable; nothing is ever written
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.size_bytes = len(self._map)
        header_bytes = int.from_bytes(self._map[:8], "little")
        self._checked = 0
        for number in range(min(len(checksums), -(-min(8 + header_bytes, self.size_bytes) // CHUNK_BYTES))):
            self._check(number)
            self._checked = number + 1
        self.tensors = self._read_header(header_bytes)

    def check_until(self, place: int) -> None:
        """Check the chunks of our share that begin before the byte `place`, but for those checked before."""
        first, every = self._share
        until = min(len(self._checksums), -(-place // CHUNK_BYTES))
        for number in range(self._checked, until):
            if number % every == first:
                self._check(number)
        self._checked = max(self._checked, until)

    def _check(self, number: int) -> None:
        with memoryview(self._map) as whole, whole[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES] as chunk:
            if chunk_checksum(chunk) != self._checksums[number]:
                raise ChunkChanged(f"{self.name} does not match its checksum")

    def _read_header(self, size: int) -> list[MappedTensor]:
        try:
            if 8 + size > self.size_bytes:
                raise ValueError("it is cut short")
            plain = json.loads(self._map[8 : 8 + size])
            found = [
                self._tensor(name, entry["dtype"], entry["shape"], entry["data_offsets"], 8 + size)
                for name, entry in plain.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
            raise BadInput("model weights", self.name, f"the file cannot be read ({error})") from error
        return sorted(found, key=lambda tensor: tensor.begin)

    def _tensor(self, name: str, kind: str, shape: list[int], offsets: list[int], front: int) -> MappedTensor:
        if kind not in _DTYPES:
            raise ValueError(f"{name} has dtype {kind}, of {', '.join(_DTYPES)}")
        dtype, count, (begin, end) = _DTYPES[kind], math.prod(shape), offsets
        if not (count > 0 and begin >= 0 and end - begin == count * dtype.itemsize and front + end <= self.size_bytes):
            raise ValueError(f"{name} does not lie in it")
        values = torch.frombuffer(self._map, dtype=dtype, count=count, offset=front + begin).view(shape)
        return MappedTensor(name, values, front + begin)
