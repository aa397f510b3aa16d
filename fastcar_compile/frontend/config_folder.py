"""A Hugging Face folder without weights: enough for a dry run."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastcar_compile.errors import InternalError
from fastcar_compile.frontend.checkpoint import Checkpoint, has_weights, read_skeleton


class ConfigFolder(Checkpoint):
    """The decoder of a config.json. Its weights have shapes, and random values where a pass has to look at some.

    Args:
        folder: with config.json.

    Raises:
        CompileError: config.json is missing, or cannot be compiled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors = folder, {}
        self.skeleton = read_skeleton(folder)
        self._dtype = getattr(self.config, "dtype", None) or torch.float32

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter at this path."""
        return self.skeleton.shapes[name]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Random values in the config's dtype, as float32; all rows are alike, so that they take no memory.

        Raises:
            InternalError: a scalar is asked for, which no pass looks at.
        """
        count, *rest = self.shape(name) or (0,)
        if not count:
            raise InternalError(f"{name} has no rows to make up")
        begin, end = rows or (0, count)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        row = torch.randn(rest, generator=generator).to(self._dtype).float()
        return row.expand(end - begin, *rest)

    def model(self) -> PreTrainedModel:
        """The part of the model that is captured; persistent buffers are as the architecture makes them."""
        return self.skeleton.model(self.skeleton.captured_layers)


def open_folder(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Return the decoder of a folder; where no weights are needed, it may have none.

    Raises:
        CompileError: everything that is wrong with the folder.
    """
    if weights or not folder.is_dir() or has_weights(folder):
        return Checkpoint(folder)
    return ConfigFolder(folder)
