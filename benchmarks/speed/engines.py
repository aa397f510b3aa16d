"""Engines by name; their modules are imported in the worker that runs them."""

from __future__ import annotations

import importlib
import importlib.util

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
    """The engine's class; ImportError where its package is not installed."""
    module, cls = ENGINES[name]
    return getattr(importlib.import_module(f"speed.{module}"), cls)
