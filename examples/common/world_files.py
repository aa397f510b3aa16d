"""The files that a player needs of a world: world.toml, the decoder, pixels.onnx and starting contexts."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from safetensors.numpy import save_file
from torch import nn
from transformers import PreTrainedModel

from fastcar_compile.codegen.onnx.segments import strip


@dataclass(frozen=True)
class WorldToml:
    """The content of world.toml, as docs/tutorial/play.md says.

    Attributes:
        actions: names and buttons; the first has the token `codes`, behind those of images.
        buttons: name -> KeyboardEvent.code of the keys that press it.
    """

    name: str
    codes: int
    grid: tuple[int, int]
    size: tuple[int, int]
    aspect: tuple[int, int]
    context_frames: int
    frames_per_second: float
    top_k: int
    buttons: Mapping[str, tuple[str, ...]]
    actions: Iterable[tuple[str, tuple[str, ...]]]

    def text(self) -> str:
        """Return the file's text."""
        lines = [
            "format = 1",
            f"name = {json.dumps(self.name)}",
            f"tokens_per_frame = {1 + self.grid[0] * self.grid[1]}",
            f"context_frames = {self.context_frames}",
            f"frames_per_second = {self.frames_per_second:.6f}",
            "",
            "[image]",
            "offset = 0",
            f"count = {self.codes}",
            f"grid = {list(self.grid)}",
            f"size = {list(self.size)}",
            f"aspect = {list(self.aspect)}",
            "",
            "[sampling]",
            "temperature = 1.0",
            f"top_k = {self.top_k}",
            "",
            "[buttons]",
            *(f"{button} = {json.dumps(keys)}" for button, keys in self.buttons.items()),
        ]
        for number, (name, buttons) in enumerate(self.actions):
            lines += ["", "[[actions]]", f"token = {self.codes + number}", f"name = {json.dumps(name)}"]
            lines.append(f"buttons = {json.dumps(buttons)}")
        return "\n".join(lines) + "\n"


def write_pixels(model: nn.Module, grid: tuple[int, int], path: Path) -> None:
    """Write what makes frames uint8 of image codes int64 as one ONNX file, without the exporter's paths.

    It has a dynamic number of frames.
    """
    torch.onnx.export(
        model.eval(),
        (torch.zeros(2, *grid, dtype=torch.int64),),
        path,
        dynamo=True,
        external_data=False,
        input_names=["tokens"],
        output_names=["frames"],
        dynamic_shapes={"tokens": {0: torch.export.Dim("frames")}},
        verbose=False,
    )
    proto = onnx.load(path)
    strip(proto)
    onnx.save(proto, path)


def write_world(
    folder: Path, toml: WorldToml, model: PreTrainedModel, pixels: nn.Module, starts: Mapping[str, np.ndarray]
) -> None:
    """Write a world's files. The decoder's weights are stored in bfloat16.

    Args:
        starts: name -> contexts int64 [frames, tokens per frame].
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "world.toml").write_text(toml.text())
    model.bfloat16().save_pretrained(folder / "decoder")
    write_pixels(pixels, toml.grid, folder / "pixels.onnx")
    names = json.dumps(list(starts))
    save_file({"tokens": np.stack(list(starts.values()))}, folder / "starts.safetensors", metadata={"names": names})
