"""TOML files: each input is read as a target, and as a policy of which artifacts are trusted."""

from __future__ import annotations

from fastcar_compile.errors import InputError, TargetError
from fastcar_compile.targets import load_target
from fastcar_compile.trust.policy import Policy
from fuzz.expect import accepted, as_file


def run(data: bytes) -> bool:
    """Read the bytes as both."""
    path = as_file("file.toml", data)
    target = accepted(TargetError, lambda: load_target(path))
    if target is not None:
        target.budget()
    policy = accepted(InputError, lambda: Policy.load(path))
    return target is not None or policy is not None
