"""A world's files: each input is read as world.toml, and as starts.safetensors, beside the other one of a right world.

pixels.onnx is read by onnxruntime, and by no code of this package.
"""

from pathlib import Path

from play.worlds import write_world

from fastcar_compile.errors import InputError
from fastcar_play.recording import most_frames
from fastcar_play.world import STARTS, WORLD, World, load_world
from fuzz.expect import Finding, accepted, folder

_RIGHT = {name: write_world(folder() / "world" / name) for name in (WORLD, STARTS)}
"""File -> a world that is right, but for this file."""


def run(data: bytes) -> bool:
    """Read the bytes as both."""
    return any([_read(name, path, data) for name, path in _RIGHT.items()])


def _read(name: str, path: Path, data: bytes) -> bool:
    (path / name).write_bytes(data)
    world = accepted(InputError, lambda: load_world(path))
    if world is not None:
        _use(world)
    return world is not None


def _use(world: World) -> None:
    """Do with a world what the server does before a decoder comes in.

    Raises:
        Finding: a right world gives what no page can show.
    """
    file = world.file
    wide, high = file.image.pixel_shape
    if not (wide > 0 < high and most_frames(file.image) > 0):
        raise Finding(f"a pixel of {wide} x {high}")
    for held in ((), tuple(file.buttons)):
        file.action(held)
