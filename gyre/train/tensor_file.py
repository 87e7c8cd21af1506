# pyright: basic
"""Tensors written to one safetensors file, with the disk's own errors when they cannot be."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises OSError: a disk that is full is ENOSPC, whatever the library makes of it."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if f"os error {errno.ENOSPC})" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path.name) from error
        raise OSError(errno.EIO, f"{path.name} could not be written ({error})") from error
