"""The interface of an engine in the comparison, and the weights that all engines read."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from speed.sizes import Job, Sizes, Traffic

ROPE_THETA = 10000.0
NORM_EPSILON = 1e-6


class Engine(ABC):
    """One engine, opened in a worker process. Peers decode one row.

    Attributes:
        package: the package whose version the row gives. notes: facts for a reader of the row.
    """

    package: ClassVar[str]
    notes: str = ""

    @staticmethod
    @abstractmethod
    def prepare(job: Job) -> None:
        """Write the engine's own files in `job.folder`. Runs in another process, which then ends."""

    @abstractmethod
    def __init__(self, job: Job) -> None: ...

    @abstractmethod
    def rewind(self, position: int) -> None:
        """Set the cache to `position` tokens. Not timed."""

    @abstractmethod
    def step(self, token: int, position: int) -> np.ndarray:
        """Decode one token and return the logits float32 [V] of the first row."""

    @abstractmethod
    def traffic(self) -> Traffic:
        """Return the bytes of a step."""

    def select(self, variant: str, tokens: int) -> None:
        """Set up a block of `tokens` steps; engines without replay have one variant."""
        del variant, tokens

    def replayed(self) -> float:
        """Return the share of layers that replayed since the last `rewind`."""
        return 0.0


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


LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP_LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def rope_tables(sizes: Sizes, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 [length, head_dim / 2]."""
    exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
    angles = torch.arange(length, dtype=torch.float32)[:, None] * ROPE_THETA**-exponents
    return angles.cos(), angles.sin()


def weight_elements(sizes: Sizes) -> tuple[int, int]:
    """Return the elements of the linears outside the MLPs (with the head), and of the MLPs."""
    attention = 2 * sizes.hidden**2 + 2 * sizes.hidden * sizes.kv_size
    other = sizes.layers * attention + sizes.vocab * sizes.hidden
    return other, sizes.layers * 3 * sizes.hidden * sizes.intermediate


def cache_elements(sizes: Sizes) -> int:
    """Return the elements of keys and values of one token."""
    return 2 * sizes.layers * sizes.kv_size
