"""Stands in for sglang-kernel, of which PyPI has no CPU build. SGLang then takes its own layers in plain torch.

What is written here are the hash that makes a seed's noise, and HiCache's copies between the device's pool, which has one
tensor [slots, heads, width] a layer for K and one for V, and the host's, in the two layouts that its `direct` back end knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gyre_stand_in import missing, stand_in
from torch import Tensor

__version__ = "0.4.10"
stand_in(__name__)


def __getattr__(name: str) -> object:
    return missing(f"{__name__}.{name}")


_OPS = torch.library.Library("sgl_kernel", "DEF")
_OPS.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_32_BITS = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (32 bits) of each row's seed and position and each column: uint32 [rows, columns]."""
    seeds, columns = seed.view(torch.int64)[:, None], col_indices[None, :].to(torch.int64)
    hashed = torch.zeros(1, 1, dtype=torch.int64)
    for words in (seeds, seeds >> 32, positions[:, None].to(torch.int64), columns):
        mixed = _rotated((words & _32_BITS) * 0xCC9E2D51 & _32_BITS, 15) * 0x1B873593 & _32_BITS
        hashed = (_rotated(hashed ^ mixed, 13) * 5 + 0xE6546B64) & _32_BITS
    hashed = hashed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ (hashed >> shift)) * factor & _32_BITS
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits | words >> (32 - bits)) & _32_BITS


_OPS.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Layout layer_first: both sides have slots within layers."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].to(target.dtype)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Layout page_first_direct, host [pages, layers, page_size, heads, width]: one layer of whole pages to the device."""
    pages = src_indices[::page_size] // page_size
    for host, layer in zip(src_ptrs, dst_ptrs, strict=True):
        layer[dst_indices] = host[pages, layer_id].reshape(-1, *layer.shape[1:]).to(layer.dtype)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Layout page_first_direct: whole pages of all layers to the host; `src_ptrs` has K's layers, then V's."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // 2
    for host, of_one in zip(dst_ptrs, (src_ptrs[:layers], src_ptrs[layers:]), strict=True):
        for number, layer in enumerate(of_one):
            host[pages, number] = layer[src_indices].reshape(len(pages), page_size, *layer.shape[1:]).to(host.dtype)
