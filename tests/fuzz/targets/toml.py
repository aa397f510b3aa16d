"""TOML files: each input is read as a target."""

from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import TargetError
from fuzz.expect import accepted, as_file


def run(data: bytes) -> bool:
    """Read the bytes as a target."""
    path = as_file("file.toml", data)
    target = accepted(TargetError, lambda: load_target(path))
    if target is not None:
        target.budget()
    return target is not None
