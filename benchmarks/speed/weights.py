"""The weights that all engines read. It imports torch, which takes seconds: engines that need it only to write their
files import it there."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from speed.base import ROPE_THETA
from speed.sizes import Sizes

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP_LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class Weights:
    """Tensors of the checkpoint by their Hugging Face names, as stored, read one at a time."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        index = self._folder / "model.safetensors.index.json"
        self._files: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.exists() else {}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._folder / self._files.get(name, "model.safetensors"), framework="pt") as file:
            return file.get_tensor(name)

    def layer(self, index: int, name: str) -> Tensor:
        """Return a weight of a layer, for example `mlp.up_proj`."""
        return self[f"model.layers.{index}.{name}.weight"]


def rope_tables(sizes: Sizes, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 [length, head_dim / 2]."""
    exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
    angles = torch.arange(length, dtype=torch.float32)[:, None] * ROPE_THETA**-exponents
    return angles.cos(), angles.sin()
