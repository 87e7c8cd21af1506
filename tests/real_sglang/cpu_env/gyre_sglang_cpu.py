"""What of SGLang's HiCache and of its seeded sampling takes a GPU for granted is mended in memory as it is imported.

`patch_when_imported` is an entry point of the group `sglang.srt.plugins`: no file of SGLang is changed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_POOLS = "sglang.srt.mem_cache.pool_host"


def _register_nothing(common: Any) -> None:
    """There is no CUDA runtime with which host memory could be registered."""
    common._cuda_host_register = common._cuda_host_unregister = lambda *_, **__: []


def _pin_nothing(base: Any) -> None:
    """Pinned memory is CUDA's."""
    make = base.HostKVCache.__init__
    named = inspect.signature(make)

    @functools.wraps(make)
    def make_unpinned(*args: object, **options: object) -> None:
        given = named.bind(*args, **options)
        given.arguments["pin_memory"] = False
        make(*given.args, **given.kwargs)

    base.HostKVCache.__init__ = make_unpinned


def _copy_in_torch(mha: Any) -> None:
    """These names are imported where there is CUDA only."""
    import sgl_kernel

    for name in (
        "transfer_kv_direct",
        "transfer_kv_per_layer_direct_pf_lf",
        "transfer_kv_all_layer_direct_lf_pf",
    ):
        setattr(mha, name, getattr(sgl_kernel, name))


def _heed_seeds(choices: Any) -> None:
    """A deterministic engine heeds seeds, and has to have an attention of which SGLang knows that it is one's."""
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def _let_batches_differ(ops: Any) -> None:
    """What computes the same in a batch of any size is written for GPUs. In float32 the difference is small."""
    ops.enable_batch_invariant_mode = lambda *_, **__: None


_PATCHES: dict[str, Callable[[Any], None]] = {
    f"{_POOLS}.common": _register_nothing,
    f"{_POOLS}.base": _pin_nothing,
    f"{_POOLS}.mha": _copy_in_torch,
    "sglang.srt.arg_groups.choices": _heed_seeds,
    "sglang.srt.batch_invariant_ops": _let_batches_differ,
}


class _Patcher(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        patch = _PATCHES.get(fullname)
        spec = PathFinder.find_spec(fullname, path) if patch else None
        if patch and spec and spec.loader:
            run = spec.loader.exec_module

            def run_and_patch(module: ModuleType) -> None:
                run(module)
                patch(module)

            spec.loader.exec_module = run_and_patch
        return spec


def patch_when_imported() -> None:
    if any(isinstance(finder, _Patcher) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Patcher())
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
