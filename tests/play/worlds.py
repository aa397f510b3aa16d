"""A tiny world: four image tokens of twelve colours, a decoder with two layers and random weights."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from safetensors.numpy import save_file

COLOURS = np.random.default_rng(3).integers(0, 256, (12, 3), dtype=np.uint8)
"""Of the image codes."""

FRAME, FRAMES = 5, 4
"""Tokens of a frame, and frames of a start."""

WORLD = """
format = 1
name = "Tiny"
tokens_per_frame = 5
context_frames = 4
frames_per_second = 100.0
[image]
offset = 1
count = 12
grid = [2, 2]
size = [2, 2]
aspect = [4, 3]
[sampling]
temperature = 1.0
top_k = 6
[buttons]
forward = ["ArrowUp", "KeyW"]
left = ["ArrowLeft"]
fire = ["Space"]
[[actions]]
token = 0
name = "still"
buttons = []
[[actions]]
token = 13
name = "turn left"
buttons = ["left"]
[[actions]]
token = 14
name = "forward left"
buttons = ["forward", "left"]
[[actions]]
token = 15
name = "shoot"
buttons = ["fire"]
"""


def colour_model() -> onnx.ModelProto:
    """tokens int64 [N, 2, 2] -> frames uint8 [N, 2, 2, 3]: a pixel for every token."""
    table = helper.make_tensor("colours", TensorProto.UINT8, COLOURS.shape, COLOURS.tobytes(), raw=True)
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT64, ["N", 2, 2])
    frames = helper.make_tensor_value_info("frames", TensorProto.UINT8, ["N", 2, 2, 3])
    node = helper.make_node("Gather", ["colours", "tokens"], ["frames"])
    graph = helper.make_graph([node], "pixels", [tokens], [frames], [table])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def starts() -> np.ndarray:
    """Two starts, int64 [2, 4, 5]."""
    tokens = np.random.default_rng(5).integers(1, 13, (2, FRAMES, FRAME))
    tokens[..., 0] = 0
    return tokens


def write_world(folder: Path) -> Path:
    """Write the files of the tiny world."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "world.toml").write_text(WORLD, "utf-8")
    (folder / "pixels.onnx").write_bytes(colour_model().SerializeToString())
    save_starts(folder, starts(), ["the hall", "the yard"])
    return folder


def save_starts(folder: Path, tokens: np.ndarray, names: list[str]) -> None:
    """Write starts."""
    save_file({"tokens": tokens}, folder / "starts.safetensors", {"names": json.dumps(names)})
