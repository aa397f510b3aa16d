"""Engines by name. The worker that runs an engine imports its module."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch, which takes seconds; a missing engine is told without
    from speed.base import Engine

OURS = "fastcar_compile"
ENGINES: dict[str, tuple[str, str]] = {
    OURS: ("ours", "Ours"),
    "pytorch eager": ("torch_peer", "TorchEager"),
    "torch.compile": ("torch_peer", "TorchCompiled"),
    "onnxruntime": ("onnx_peer", "OnnxRuntime"),
    "openvino": ("openvino_peer", "OpenVino"),
    "llama.cpp": ("llama_peer", "LlamaCpp"),
}


def engine_class(name: str) -> type[Engine]:
    """Return the engine's class. Raise ImportError if its package is not installed."""
    module, cls = ENGINES[name]
    return getattr(importlib.import_module(f"speed.{module}"), cls)
