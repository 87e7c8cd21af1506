# pyright: basic
"""The Megatron model of one replica: its process groups, its GPTModel, its flat buffers and its optimizer.

`replica` says when; here is how. The gradient of everything lies in one flat buffer and so do the parameters, which is
what lets sums be shipped, merged and stepped on without touching single parameters.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from gyre.config import OptimizerSection
from gyre.errors import BadInput
from gyre.train import cpu_adapter
from gyre.train.shape import ModelShape

cpu_adapter.install()

from megatron.core import parallel_state  # noqa: E402 - the adapter comes first
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import (  # noqa: E402
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.tensor_parallel import (  # noqa: E402
    model_parallel_cuda_manual_seed,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402


def start_groups() -> None:
    """Start this process's groups: a world of one rank, met in memory, so that no port is needed. May be repeated."""
    if parallel_state.model_parallel_is_initialized():
        return
    if not torch.distributed.is_initialized():
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


class CausalAttention(torch.nn.Module):
    """Megatron's core attention by torch's fused kernel: causal, so padding after a sequence changes nothing in it."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: object, **__: object) -> None:
        super().__init__()
        self._repeats = config.num_attention_heads // (config.num_query_groups or config.num_attention_heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object) -> Tensor:
        tokens, rows = query.shape[:2]
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if self._repeats > 1:
            key, value = (part.repeat_interleave(self._repeats, dim=1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.permute(2, 0, 1, 3).reshape(tokens, rows, -1)


class MegatronModel:
    """One GPTModel in Megatron's data-parallel wrapper; `params` and `grads` are its two flat buffers."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        config = _transformer_config(shape)
        spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
        spec.submodules.self_attention.submodules.core_attention = CausalAttention
        with cpu_adapter.redirected():
            model = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=shape.vocab_size,
                max_sequence_length=shape.context_tokens,
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="rope",
                rotary_base=cast(int, shape.rope_theta),  # annotated as a whole number, used as any
            )
            if torch.cuda.is_available():
                model = model.cuda()
            buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            self.ddp = DistributedDataParallel(config, buffers, model)
        (self._buffer,) = cast(list[Any], self.ddp.buffers)
        self.grads: Tensor = self._buffer.grad_data
        self.params: Tensor = self._buffer.param_data
        self.named = dict(model.named_parameters())
        self.layout_hash = self._layout_hash()

    @property
    def device(self) -> torch.device:
        return self.params.device

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take parameters by Megatron's names into the flat buffer, which may have been freed."""
        for name, parameter in self.named.items():
            if weights[name].shape != parameter.shape:
                allowed = f"{tuple(parameter.shape)} by config.json"
                raise BadInput(f"model weights {name}", tuple(weights[name].shape), allowed)
        _allocate(self.params)
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(weights[name])

    def zero_grads(self) -> None:
        _allocate(self.grads)
        self.ddp.zero_grad_buffer()

    def free(self) -> None:
        """Give back the memory of both flat buffers; every view of them stays and is whole again after `load`."""
        for flat in (self.params, self.grads):
            flat.untyped_storage().resize_(0)

    def log_probs(self, token_ids: Tensor, temperature: float) -> Tensor:
        """Of each row's tokens 1 … n-1 given those before: float32 [rows, n - 1], at this sampling temperature."""
        rows, tokens = token_ids.shape
        positions = torch.arange(tokens, device=token_ids.device).expand(rows, tokens)
        logits = self.ddp(token_ids, positions, None)[:, :-1].float()
        if temperature != 1.0:
            logits = logits / temperature
        return -vocab_parallel_cross_entropy(logits.contiguous(), token_ids[:, 1:].contiguous())

    def _layout_hash(self) -> str:
        """Two replicas with the same hash keep every gradient at the same place of the flat buffer."""
        state = hashlib.sha256()
        for name, parameter in self.named.items():
            start, end, _ = self._buffer.param_index_map[parameter]
            state.update(f"{name} {tuple(parameter.shape)} {start} {end}\n".encode())
        state.update(f"{self.grads.dtype} {self.grads.numel()}".encode())
        return state.hexdigest()[:32]


class AdamW:
    """Megatron's distributed AdamW over one model, with its moments by parameter name, to be saved and taken again.

    Norms and biases are not decayed.
    """

    def __init__(self, model: MegatronModel, section: OptimizerSection) -> None:
        self._weight_decay = section.weight_decay
        config = OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            clip_grad=section.clip_grad,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
        )
        with cpu_adapter.redirected():
            self._chained: Any = get_megatron_optimizer(config, [model.ddp], get_standard_config_overrides(config))
        (self._distributed,) = self._chained.chained_optimizers
        self._inner: torch.optim.Optimizer = self._distributed.optimizer
        names = {parameter: name for name, parameter in model.named.items()}
        pairs = zip(self._distributed.model_fp32_groups, self._distributed.shard_fp32_groups, strict=True)
        self._shards: dict[str, Tensor] = {
            names[whole]: shard for group, shards in pairs for whole, shard in zip(group, shards, strict=True)
        }

    def step(self, lr: float) -> float:
        """Clip the gradient in the flat buffer and step; returns the gradient's norm before clipping."""
        for group in self._inner.param_groups:
            # the part of Megatron's learning-rate scheduler: rates are set from outside, by each group's multiples
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        with cpu_adapter.redirected():
            stepped, norm, _ = self._chained.step()
        if not stepped:
            raise RuntimeError("Megatron's optimizer did not step")
        return float(norm)

    def clear(self) -> None:
        """Forget the moments, and give their memory back."""
        self._inner.state.clear()

    def moments(self) -> dict[str, Tensor]:
        """A copy of all state by name: `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`."""
        return {
            f"{key}.{name}": torch.as_tensor(value).to("cpu", copy=True)
            for name, shard in self._shards.items()
            for key, value in self._inner.state.get(shard, {}).items()
        }

    def take(self, moments: Mapping[str, Tensor]) -> None:
        """Go on from what `moments` gave (nothing, before the first step). Raises KeyError when it lacks a parameter."""
        self.clear()
        if not moments:
            return
        for name, shard in self._shards.items():
            average, square, step = (moments[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step"))
            device = shard.device
            self._inner.state[shard] = {
                "step": step.clone(),
                "exp_avg": average.to(device, copy=True),
                "exp_avg_sq": square.to(device, copy=True),
            }


def _allocate(flat: Tensor) -> None:
    """Give a freed flat buffer its memory again; its content is then whatever is there."""
    size_bytes = flat.numel() * flat.element_size()
    if flat.untyped_storage().nbytes() != size_bytes:
        flat.untyped_storage().resize_(size_bytes)


def _transformer_config(shape: ModelShape) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_size,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        # gradients are sums, divided once at the step: no mean over anything on the way
        calculate_per_token_loss=True,
        # the fused kernels of these are CUDA's
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
