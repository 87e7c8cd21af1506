"""Stands in for sglang-kernel, of which PyPI has no CPU build. SGLang then takes its own layers in plain torch.

What is written here are HiCache's copies between the device's pool, which has one tensor [slots, heads, width] a layer
for K and one for V, and the host's, in the two layouts that its `direct` back end knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre_stand_in import missing, stand_in
from torch import Tensor

__version__ = "0.4.10"
stand_in(__name__)


def __getattr__(name: str) -> object:
    return missing(f"{__name__}.{name}")


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
