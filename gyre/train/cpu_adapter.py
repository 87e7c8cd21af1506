# pyright: basic
"""Megatron-core on a machine without CUDA.

Megatron asks for CUDA devices, streams and random states by name, also where nothing needs a GPU. `install` answers the
`torch.cuda` calls it makes with their CPU meaning, once and for the whole process, which must be the replica's own.
`redirected` turns tensors that are asked for on `cuda` into CPU tensors, for the calling thread and while it lasts:
around building the model and the optimizer and stepping it. Where CUDA is there, both do nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"
_installed = False


def install() -> None:
    """Make `import megatron.core` and its use possible here. To be called before megatron is first imported."""
    global _installed
    if _installed:
        return
    _installed = True
    # Megatron warns at import, once a module, that it found no GPU libraries; that is the very point of this process.
    warnings.filterwarnings("ignore", module=r"megatron\.", category=UserWarning)
    # and it calls collectives by names that torch has given others since
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if importlib.util.find_spec("triton") is None:
        _leave_out_triton()
    if not torch.cuda.is_available():
        _answer_for_cuda()


def redirected() -> AbstractContextManager[Any]:
    """While it lasts, this thread's `device="cuda"` means the CPU."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaMeansCpu()


class _Idle:
    """Stands for a CUDA stream or event: there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the optimizer sorts parameters by the name of their CUDA type
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _answer_for_cuda() -> None:
    def nothing(*_: object, **__: object) -> None:
        return None

    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda *_, **__: _Idle(),
        "empty_cache": nothing,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": nothing,
        # classes, since other libraries annotate with them
        "Event": _Idle,
        "Stream": _Idle,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    _import_without_compiler()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = answers["get_rng_state"]
    random._set_cuda_rng_state = answers["set_rng_state"]


def _import_without_compiler() -> None:
    """Megatron decorates fused kernels with `torch.compile` when imported, which loads torch's whole compiler: seconds
    and 70 MB for kernels that the CPU path does not call."""
    compile_ = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda later: later)
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_
    jit.disable_jit_fuser()


def _leave_out_triton() -> None:
    """megatron-core 0.17 and later import one module of mixture-of-experts kernels that needs triton, for any model."""
    module: Any = types.ModuleType(_PAGED_STASH)
    module.GLOBAL_BLOCK_SIZE = 1024
    module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
    sys.modules[_PAGED_STASH] = module
