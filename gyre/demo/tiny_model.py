"""A Qwen3 model in plain torch, just large enough to train the demo's policy from nothing.

Its parameters carry the names of Hugging Face checkpoints, so the state it is left in is the checkpoint. Serving and
reinforcement learning never use it: they load the checkpoint with the engine and with the replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class TinyConfig:
    """The sizes of the policy; the defaults are the shipped ones."""

    vocabulary_tokens: int = 256
    hidden: int = 128
    feed_forward: int = 384
    layers: int = 3
    heads: int = 4
    head_width: int = 32
    context_tokens: int = 1024
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6


class Attention(nn.Module):
    """Causal self-attention with the per-head query and key norms of Qwen3."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        inner = config.heads * config.head_width
        self.q_proj = nn.Linear(config.hidden, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_width, config.norm_epsilon)
        self.k_norm = nn.RMSNorm(config.head_width, config.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        query, key, value = (
            projection(x).view(rows, tokens, self.heads, self.head_width)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = _rotate(self.q_norm(query).transpose(1, 2), cos, sin)
        key = _rotate(self.k_norm(key).transpose(1, 2), cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value.transpose(1, 2), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class FeedForward(nn.Module):
    """The gated feed-forward layer (SwiGLU)."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.down_proj = nn.Linear(config.feed_forward, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """What a Hugging Face checkpoint keeps under `model.`."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary_tokens, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_epsilon)


class TinyModel(nn.Module):
    """Token ids `[rows, tokens]` to logits `[rows, tokens, vocabulary]`; rows are padded on the right."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.6 / math.sqrt(parameter.shape[1]))
        nn.init.normal_(self.model.embed_tokens.weight, 0.0, 0.02)
        pairs = torch.arange(0, config.head_width, 2).float() / config.head_width
        angles = torch.arange(config.context_tokens).float()[:, None] / config.rope_theta**pairs
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(token_ids)
        cos, sin = self.cos[: token_ids.shape[1]], self.sin[: token_ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def hugging_face_config(self, turn_end_id: int, end_of_text_id: int) -> dict[str, object]:
        """The `config.json` of the checkpoint."""
        config = self.config
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": config.vocabulary_tokens,
            "hidden_size": config.hidden,
            "intermediate_size": config.feed_forward,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.heads,
            "head_dim": config.head_width,
            "rms_norm_eps": config.norm_epsilon,
            "rope_theta": config.rope_theta,
            "max_position_embeddings": config.context_tokens,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "use_cache": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "bos_token_id": None,
            "eos_token_id": turn_end_id,
            "pad_token_id": end_of_text_id,
            "torch_dtype": "float32",
        }


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
