# pyright: basic
"""The Megatron model of one replica: its process groups, its GPTModel, its flat buffers and its optimizer.

`replica` says when; here is how. The gradient of everything lies in one flat buffer and so do the parameters, which is
what lets sums be shipped, merged and stepped on without touching single parameters. Of a replica of several ranks (tensor
parallel) each has its part of both.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage]

from gyre.config import OptimizerSection
from gyre.train import cpu_adapter
from gyre.train.flat_memory import FlatMemory
from gyre.train.maps import model_hash, pieces, read_weights
from gyre.train.ranks import ALONE, RankPlace, Ranks
from gyre.train.shape import ModelShape
from gyre.train.tensor_file import MappedFile

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


def start_groups(place: RankPlace = RankPlace()) -> Ranks:  # noqa: B008 - frozen
    """Start this process's groups, once: alone, met in memory, or with the other ranks, at the file of their meeting."""
    cuda = torch.cuda.is_available()
    if not parallel_state.model_parallel_is_initialized():
        if cuda:
            torch.cuda.set_device(place.device)
        if not torch.distributed.is_initialized():
            if any(name == "lo" for _, name in socket.if_nameindex()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = HashStore() if place.count == 1 else FileStore(place.meeting, place.count)
            torch.distributed.init_process_group(
                "nccl" if cuda else "gloo", store=store, rank=place.rank, world_size=place.count
            )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=place.count)
        model_parallel_cuda_manual_seed(1)
    if place.count == 1:
        return ALONE
    return Ranks(place.rank, place.count, torch.distributed.new_group(backend="gloo") if cuda else None)


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
    """One GPTModel in Megatron's data-parallel wrapper; `params` and `grads` are its two flat buffers, or the rank's part
    of them."""

    def __init__(self, shape: ModelShape, ranks: Ranks = ALONE) -> None:
        self.shape = shape
        self.pieces = pieces(shape)
        self.model_hash = model_hash(self.pieces)
        self._ranks = ranks
        config = _transformer_config(shape, ranks.count)
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
        named = dict(model.named_parameters())
        for piece in self.pieces:  # Megatron says so when it initialises weights, which it has no need to here
            cast(Any, named[piece.ours]).tensor_model_parallel = piece.split is not None
        (self._buffer,) = cast(list[Any], self.ddp.buffers)
        self.grads: Tensor = self._buffer.grad_data
        self.params: Tensor = self._buffer.param_data
        self.named = named
        self._memories = FlatMemory(self.params), FlatMemory(self.grads)
        self._buffer.reset = self._memories[1].zeros  # called by zero_grad_buffer; Megatron's own writes all of it
        self.layout_hash = self._layout_hash()

    @property
    def device(self) -> torch.device:
        return self.params.device

    @property
    def numbers(self) -> int:
        """In the flat buffers of all ranks together."""
        return self.grads.numel() * self._ranks.count

    def load(self, files: Sequence[MappedFile]) -> None:
        """Take the parameters from files in Hugging Face's layout into the flat buffer. Raises as `read_weights`."""
        params, _ = self._memories
        params.take()
        read_weights(files, self.shape, lambda name: self.named[name].detach(), self._ranks)

    def zero_grads(self) -> None:
        self.ddp.zero_grad_buffer()

    def free(self) -> None:
        """Give back the memory of both flat buffers; every view of them stays."""
        for memory in self._memories:
            memory.give_back()

    def join_shared_grads(self) -> None:
        """Have the same gradient of what every rank has whole, in place of each one's own.

        That of a norm between layers is the same on all ranks, and the first's stands; of one inside the heads each rank
        has its heads' part, and they are added up.
        """
        if self._ranks.count == 1:
            return
        shared = [piece for piece in self.pieces if piece.split is None]
        grads = [cast(Any, self.named[piece.ours]).main_grad for piece in shared]
        flat = torch.cat([grad.flatten() for grad in grads])
        parts = flat.split([grad.numel() for grad in grads])
        if not self._ranks.first:
            for piece, part in zip(shared, parts, strict=True):
                if not piece.of_heads:
                    part.zero_()
        torch.distributed.all_reduce(flat, group=parallel_state.get_tensor_model_parallel_group())
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))

    def log_probs(self, token_ids: Tensor, temperature: float) -> Tensor:
        """Of each row's tokens 1 … n-1 given those before: float32 [rows, n - 1], at this sampling temperature."""
        rows, tokens = token_ids.shape
        positions = torch.arange(tokens, device=token_ids.device).expand(rows, tokens)
        logits = self.ddp(token_ids, positions, None)[:, :-1].float()
        if temperature != 1.0:
            logits = logits / temperature
        return -vocab_parallel_cross_entropy(logits.contiguous(), token_ids[:, 1:].contiguous())

    def _layout_hash(self) -> str:
        """Two replicas with the same hash keep every gradient at the same place of the same rank's flat buffer."""
        state = hashlib.sha256()
        for name, parameter in self.named.items():
            start, end, _ = self._buffer.param_index_map[parameter]
            state.update(f"{name} {tuple(parameter.shape)} {start} {end}\n".encode())
        state.update(f"{self.grads.dtype} {self.grads.numel()}".encode())
        of_ranks = self._ranks.hear_all((state.hexdigest()[:32], self.grads.numel()))
        if {numbers for _, numbers in of_ranks} != {self.grads.numel()}:
            raise RuntimeError(f"the ranks' parts are not of one size: {of_ranks}")
        if len(of_ranks) > 1:
            state.update(repr(of_ranks).encode())
        return state.hexdigest()[:32]


MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Megatron's distributed AdamW over one model, with its moments by parameter name, to be read and filled again.

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
        self._shapes = {name: parameter.shape for name, parameter in model.named.items()}
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

    @property
    def steps(self) -> float:
        """How many it has taken since the moments began; 0: there are none."""
        return max((float(state["step"]) for state in self._inner.state.values()), default=0.0)

    def begin(self, steps: float) -> None:
        """Have moments, of so many steps, all zero: to be filled."""
        self.clear()
        for shard in self._shards.values():
            moments = {moment: torch.zeros_like(shard) for moment in MOMENTS}
            self._inner.state[shard] = {"step": torch.tensor(steps), **moments}

    def moments(self, moment: str) -> dict[str, Tensor]:
        """One of MOMENTS by parameter name, in the parameter's shape: views."""
        return {name: self._inner.state[shard][moment].view(self._shapes[name]) for name, shard in self._shards.items()}


def _transformer_config(shape: ModelShape, ranks: int) -> TransformerConfig:
    return TransformerConfig(
        tensor_model_parallel_size=ranks,
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
