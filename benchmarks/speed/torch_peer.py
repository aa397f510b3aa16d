"""PyTorch: a plain Llama step over a static cache, eager and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional

from speed.base import NORM_EPSILON, Engine, Weights, cache_elements, rope_tables, weight_elements
from speed.sizes import Job, Sizes, Traffic

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layer(nn.Module):
    """One decoder layer, with q, k, v in one product and gate, up in another, as in GPT-fast."""

    def __init__(self, weights: Weights, index: int, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()

        def read(*names: str) -> nn.Parameter:
            return nn.Parameter(torch.cat([weights.layer(index, n).to(dtype) for n in names]), requires_grad=False)

        self.sizes = sizes
        self.head_norms = [read("self_attn.q_norm"), read("self_attn.k_norm")] if sizes.qk_norm else []
        self.norm, self.mlp_norm = read("input_layernorm"), read("post_attention_layernorm")
        self.qkv = read("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out, self.down = read("self_attn.o_proj"), read("mlp.down_proj")
        self.gate_up = read("mlp.gate_proj", "mlp.up_proj")
        shape = (1, sizes.groups, sizes.cache_length, sizes.head_dim)
        self.keys, self.values = (nn.Buffer(torch.zeros(shape, dtype=dtype)) for _ in range(2))

    def forward(self, x: Tensor, position: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        """Return x [1, 1, H] after the layer; position int64 [1], rope [2, head_dim], mask bool [1, 1, 1, S]."""
        h = functional.rms_norm(x, x.shape[-1:], self.norm, NORM_EPSILON)
        sizes = self.sizes
        qkv = functional.linear(h, self.qkv).view(1, -1, 1, sizes.head_dim)
        q, k, v = qkv.split([sizes.heads, sizes.groups, sizes.groups], 1)
        if self.head_norms:
            q = functional.rms_norm(q, q.shape[-1:], self.head_norms[0], NORM_EPSILON)
            k = functional.rms_norm(k, k.shape[-1:], self.head_norms[1], NORM_EPSILON)
        q, k = _rotate(q, rope), _rotate(k, rope)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        grouped = sizes.groups != sizes.heads
        y = functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=grouped)
        x = x + functional.linear(y.reshape(1, 1, -1), self.out)
        h = functional.rms_norm(x, x.shape[-1:], self.mlp_norm, NORM_EPSILON)
        gate, up = functional.linear(h, self.gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, self.down)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-b, a], -1) * rope[1]


class Llama(nn.Module):
    """A Llama whose caches are buffers, written in place."""

    def __init__(self, weights: Weights, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Buffer(weights["model.embed_tokens.weight"].to(dtype))
        self.norm = nn.Parameter(weights["model.norm.weight"].to(dtype), requires_grad=False)
        self.head = nn.Parameter(weights["lm_head.weight"].to(dtype), requires_grad=False)
        self.layers = nn.ModuleList(Layer(weights, i, sizes, dtype) for i in range(sizes.layers))
        cos, sin = rope_tables(sizes, sizes.cache_length)
        self.rope = nn.Buffer(torch.stack([cos.repeat(1, 2), sin.repeat(1, 2)]).to(dtype))
        self.positions = nn.Buffer(torch.arange(sizes.cache_length))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the logits [V] of token int64 [1] at position int64 [1]."""
        x = self.embedding[token].unsqueeze(0)
        rope, mask = self.rope[:, position], (self.positions <= position).view(1, 1, 1, -1)
        for layer in self.layers:
            x = layer(x, position, rope, mask)
        x = functional.rms_norm(x, x.shape[-1:], self.norm, NORM_EPSILON)
        return functional.linear(x, self.head).view(-1)


class TorchEager(Engine):
    """Eager, under inference mode."""

    package = "torch"
    notes = "fused qkv and gate/up; static cache of the context's length, written in place"

    @staticmethod
    def prepare(job: Job) -> None:
        """Do nothing: the weights are read from the checkpoint."""

    def __init__(self, job: Job) -> None:
        self._sizes, self._dtype = job.sizes, DTYPES[job.precision]
        torch.set_num_threads(job.sizes.threads)
        with torch.inference_mode():
            self._model = Llama(Weights(job.checkpoint), job.sizes, self._dtype).eval()

    def rewind(self, position: int) -> None:
        """Do nothing: the mask follows the position."""

    def step(self, token: int, position: int) -> np.ndarray:
        """Decode one token and return its logits."""
        with torch.inference_mode():
            return self._model(torch.tensor([token]), torch.tensor([position])).float().numpy()

    def traffic(self) -> Traffic:
        """Return the bytes of the weights and of the filled cache, in the engine's own type."""
        size = self._dtype.itemsize
        other, mlp = weight_elements(self._sizes)
        return Traffic(other * size, mlp * size, cache_elements(self._sizes) * size)


class TorchCompiled(TorchEager):
    """torch.compile: float32 by regions, with one graph for all layers; bfloat16 the whole step, frozen.

    Freezing lets oneDNN pack bfloat16 weights once for its kernels. It multiplies float32 weights as stored, so a
    packed copy would only take memory.
    """

    notes = f"{TorchEager.notes}; max-autotune; bfloat16 with freezing"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        options: dict[str, Any] = {"mode": "max-autotune", "fullgraph": True, "dynamic": False}
        if self._dtype is torch.float32:
            for layer in self._model.layers:
                layer.compile(**options)
        else:
            inductor.freezing = True
            self._model.compile(**options)
