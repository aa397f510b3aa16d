"""Checks and conversions of the tensors of a trained gate. This file loads torch; `weights.py` does not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fastcar_compile.gates.weights import PARAMETERS, LayerWeights


def layer_weights(params: Mapping[str, Tensor]) -> LayerWeights:
    """Return one layer's network, w1 rounded to bfloat16."""
    rest = {name: params[name].detach().float().contiguous() for name in PARAMETERS[1:]}
    return LayerWeights(w1=params["w1"].detach().to(torch.bfloat16).contiguous(), **rest)


def problems_of(layer: int, params: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with one layer's tensors."""
    problems = [f"layer.{layer}.{name} is missing" for name in PARAMETERS if name not in params]
    problems += [f"unknown tensor 'layer.{layer}.{name}'" for name in sorted(set(params) - set(PARAMETERS))]
    known = {name: tensor for name, tensor in params.items() if name in PARAMETERS}
    for name, tensor in known.items():
        if not tensor.is_floating_point():
            problems.append(f"layer.{layer}.{name} is {tensor.dtype}, expected float32")
        elif not tensor.float().isfinite().all():
            problems.append(f"layer.{layer}.{name} has values that are not finite")
    if "w1" in known:
        problems += _wrong_shapes(layer, known)
    return problems


def _wrong_shapes(layer: int, known: Mapping[str, Tensor]) -> list[str]:
    shape = tuple(known["w1"].shape)
    if len(shape) != 2 or shape[1] % 2 or 0 in shape:
        return [f"layer.{layer}.w1 has shape {list(shape)}, expected [units, 2 H]"]
    expected = {"b1": (shape[0],), "w2": (shape[0],), "b2": (1,)}
    return [
        f"layer.{layer}.{name} has shape {list(known[name].shape)}, expected {list(wanted)} as w1 is {list(shape)}"
        for name, wanted in expected.items()
        if name in known and tuple(known[name].shape) != wanted
    ]


def digest_of(layers: Mapping[int, LayerWeights]) -> str:
    """Return the SHA-256 of all names, shapes and values."""
    digest = hashlib.sha256()
    for layer, weights in sorted(layers.items()):
        for name, tensor in weights.params().items():
            digest.update(f"{layer}.{name}.{tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
