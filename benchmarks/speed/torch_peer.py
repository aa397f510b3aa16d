"""PyTorch: a plain Llama step over a static cache, eager and compiled."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional

from speed.base import NORM_EPSILON, Engine, cache_elements
from speed.sizes import DECODE, Job, Traffic
from speed.weights import Weights, rope_tables
from speed.work import weight_elements

FILL = 0.01
"""What caches hold at first. Pages of untouched zeros would be read from the processor's cache."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layer(nn.Module):
    """One decoder layer, with q, k, v in one product and gate, up in another, as in GPT-fast."""

    def __init__(self, weights: Weights, index: int, job: Job, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = job.sizes

        def read(*names: str) -> nn.Parameter:
            return nn.Parameter(torch.cat([weights.layer(index, n).to(dtype) for n in names]), requires_grad=False)

        self.sizes = sizes
        self.head_norms = [read("self_attn.q_norm"), read("self_attn.k_norm")] if sizes.qk_norm else []
        self.norm, self.mlp_norm = read("input_layernorm"), read("post_attention_layernorm")
        self.qkv = read("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out, self.down = read("self_attn.o_proj"), read("mlp.down_proj")
        self.gate_up = read("mlp.gate_proj", "mlp.up_proj")
        shape = (job.batch, sizes.groups, sizes.cache_length, sizes.head_dim)
        self.keys, self.values = (nn.Buffer(torch.full(shape, FILL, dtype=dtype)) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        """Return x [B, T, H] after the layer; positions int64 [T], rope [2, T, head_dim], mask bool [1, 1, 1, S]."""
        h = functional.rms_norm(x, x.shape[-1:], self.norm, NORM_EPSILON)
        sizes = self.sizes
        qkv = functional.linear(h, self.qkv).view(*x.shape[:2], -1, sizes.head_dim).transpose(1, 2)
        q, k, v = qkv.split([sizes.heads, sizes.groups, sizes.groups], 1)
        if self.head_norms:
            q = functional.rms_norm(q, q.shape[-1:], self.head_norms[0], NORM_EPSILON)
            k = functional.rms_norm(k, k.shape[-1:], self.head_norms[1], NORM_EPSILON)
        q, k = _rotate(q, rope), _rotate(k, rope)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        grouped = sizes.groups != sizes.heads
        if x.shape[1] > 1:  # a prompt from position 0 on attends to itself
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            y = functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=grouped)
        x = x + functional.linear(y.transpose(1, 2).flatten(2), self.out)
        h = functional.rms_norm(x, x.shape[-1:], self.mlp_norm, NORM_EPSILON)
        gate, up = functional.linear(h, self.gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, self.down)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-b, a], -1) * rope[1]


class Llama(nn.Module):
    """A Llama whose caches are buffers, written in place."""

    def __init__(self, weights: Weights, job: Job, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = job.sizes
        self.embedding = nn.Buffer(weights["model.embed_tokens.weight"].to(dtype))
        self.norm = nn.Parameter(weights["model.norm.weight"].to(dtype), requires_grad=False)
        self.head = nn.Parameter(weights["lm_head.weight"].to(dtype), requires_grad=False)
        self.layers = nn.ModuleList(Layer(weights, i, job, dtype) for i in range(sizes.layers))
        cos, sin = rope_tables(sizes, sizes.cache_length)
        self.rope = nn.Buffer(torch.stack([cos.repeat(1, 2), sin.repeat(1, 2)]).to(dtype))
        self.positions = nn.Buffer(torch.arange(sizes.cache_length))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [B, V] of the last of tokens int64 [B, T] at positions int64 [T]."""
        x = self.embedding[tokens]
        rope, mask = self.rope[:, positions], (self.positions <= positions[-1]).view(1, 1, 1, -1)
        for layer in self.layers:
            x = layer(x, positions, rope, mask)
        x = functional.rms_norm(x[:, -1], x.shape[-1:], self.norm, NORM_EPSILON)
        return functional.linear(x, self.head)


class TorchEager(Engine):
    """Eager, under inference mode."""

    package = "torch"
    notes = "fused qkv and gate/up; static cache of the context's length, written in place"

    @staticmethod
    def prepare(job: Job) -> None:
        """Do nothing: the weights are read from the checkpoint."""

    def __init__(self, job: Job) -> None:
        self._job, self._dtype = job, DTYPES[job.precision]
        torch.set_num_threads(job.sizes.threads)
        with torch.inference_mode():
            self._model = Llama(Weights(job.checkpoint), job, self._dtype).eval()

    def rewind(self, position: int) -> None:
        """Do nothing: the mask follows the position."""

    def step(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Decode tokens and return the last one's logits."""
        positions = torch.arange(position, position + tokens.shape[1])
        with torch.inference_mode():
            return self._model(torch.from_numpy(tokens), positions).float().numpy()

    def traffic(self) -> Traffic:
        """Return the bytes of the weights and of the filled cache, in the engine's own type."""
        size = self._dtype.itemsize
        other, mlp = weight_elements(self._job.sizes)
        return Traffic(other * size, mlp * size, cache_elements(self._job) * size)


class TorchCompiled(TorchEager):
    """torch.compile: float32 by regions, with one graph for all layers; bfloat16 the whole step, frozen.

    Freezing lets oneDNN pack bfloat16 weights once for its kernels. It multiplies float32 weights as stored, so a
    packed copy would only take memory.
    """

    notes = f"{TorchEager.notes}; max-autotune for one video; bfloat16 with freezing"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        mode = "max-autotune" if job.workload == DECODE else "default"
        options: dict[str, Any] = {"mode": mode, "fullgraph": True, "dynamic": False}
        if self._dtype is torch.float32:
            for layer in self._model.layers:
                layer.compile(**options)
        else:
            inductor.freezing = True
            self._model.compile(**options)
