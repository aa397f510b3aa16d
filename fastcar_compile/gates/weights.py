"""Weights of the gate `learned`: one small network per layer, in a safetensors file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fastcar_compile.errors import CompileError
from fastcar_compile.gates.gate_file import HINT, read_gate_file, write_gate_file

PARAMETERS = ("w1", "b1", "w2", "b2")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"layer\.(0|[1-9][0-9]*)\.([a-z0-9]+)")


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The network of one layer: score = w2 . relu(w1 @ [x ; |x - x_cached|] + b1) + b2.

    Attributes:
        w1: bfloat16 [units, 2 H]; rounded when it is given, as it is all that costs memory traffic.
        b1, w2: float32 [units]. b2: float32 [1].
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @property
    def units(self) -> int:
        """Hidden units."""
        return len(self.b1)

    def params(self) -> dict[str, Tensor]:
        """By name, in the order of PARAMETERS."""
        return {name: getattr(self, name) for name in PARAMETERS}


@dataclass(frozen=True, eq=False)
class GateWeights:
    """The networks of a decoder's layers; equal where the digests are.

    Attributes:
        digest: SHA-256 of all values as the compiled gate has them. With no layers, it only names weights that are
            elsewhere: what a manifest keeps.
        layers: layer -> its network.
    """

    digest: str
    layers: Mapping[int, LayerWeights] = field(default_factory=dict, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GateWeights) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def name(self) -> str:
        """`sha256:…`, what stands for the weights in JSON."""
        return f"sha256:{self.digest}"

    @classmethod
    def of(cls, layers: Mapping[int, Mapping[str, Tensor]], where: str = "gate weights") -> GateWeights:
        """Weights from layer -> name (of PARAMETERS) -> float tensor of any precision.

        Raises:
            CompileError: missing or unknown tensors, shapes that do not fit, values that are not finite; all at once.
        """
        problems = [p for layer, params in sorted(layers.items()) for p in _problems(layer, params)]
        if not layers:
            problems.append("there is no layer")
        if problems:
            raise CompileError.collect([CompileError(p, where=where, hint=HINT) for p in problems])
        made = {layer: _layer(params) for layer, params in sorted(layers.items())}
        return cls(_digest(made), made)

    @classmethod
    def load(cls, path: str | Path) -> GateWeights:
        """Read a file written by `save`.

        Raises:
            UserError: it cannot be read. CompileError: format, version, tensors; all that is wrong at once.
        """
        _, tensors = read_gate_file(path)
        layers: dict[int, dict[str, Tensor]] = {}
        unknown = []
        for name, tensor in sorted(tensors.items()):
            match = _NAME.fullmatch(name)
            if match is None:
                unknown.append(CompileError(f"unknown tensor {name!r}", where=str(path), hint=HINT))
            else:
                layers.setdefault(int(match[1]), {})[match[2]] = tensor
        try:
            weights = cls.of(layers, str(path))
        except CompileError as error:
            raise CompileError.collect([*unknown, error]) if unknown else error from None
        if unknown:
            raise CompileError.collect(unknown)
        return weights

    def save(self, path: str | Path) -> None:
        """Write the file, all values in float32; same weights, same bytes."""
        self.require()
        named = {layer: weights.params().items() for layer, weights in self.layers.items()}
        write_gate_file(path, {f"layer.{i}.{n}": t.float().contiguous() for i, ts in named.items() for n, t in ts}, {})

    def check(self, hidden: Sequence[int]) -> None:
        """Raises CompileError, with all that is wrong, unless there is a network for every layer's hidden size."""
        self.require()
        problems = []
        for layer, width in enumerate(hidden):
            if layer not in self.layers:
                problems.append(f"the gate's weights have no layer {layer}; they have {_ranges(self.layers)}")
            elif self.layers[layer].w1.shape[1] != 2 * width:
                units, inputs = self.layers[layer].w1.shape
                what = f"layer {layer}: w1 is [{units}, {inputs}], but the decoder's hidden size is {width}"
                problems.append(f"{what}: it must be [units, {2 * width}]")
        if extra := sorted(set(self.layers) - set(range(len(hidden)))):
            problems.append(f"the gate's weights have a layer {extra[0]}, but the decoder has {len(hidden)} layers")
        if problems:
            hint = "train the gate on this decoder"
            raise CompileError.collect([CompileError(p, where="gate_weights", hint=hint) for p in problems])

    def require(self) -> None:
        """Raises CompileError where only the digest is known."""
        if not self.layers:
            what = f"the weights of the gate are known only by their digest, {self.name}"
            raise CompileError(what, where="gate_weights", hint="give the file: gate_weights=…, or --gate-weights FILE")

    def layer(self, layer: int) -> LayerWeights:
        """One layer's network.

        Raises:
            CompileError: it is not there.
        """
        self.require()
        if layer not in self.layers:
            what = f"the gate's weights have no layer {layer}; they have {_ranges(self.layers)}"
            raise CompileError(what, where="gate_weights", hint="train the gate on this decoder")
        return self.layers[layer]


def gate_parameter(name: str, layer: int) -> str:
    """Name in the program of a gate's parameter, as in gate_w1_0."""
    return f"gate_{name}_{layer}"


def weights_in(params: Mapping[str, Tensor], layers: int) -> GateWeights | None:
    """The gate's weights among a rewritten program's parameters; None: there are none."""
    found: dict[int, dict[str, Tensor]] = {}
    for layer in range(layers):
        names = {name: gate_parameter(name, layer) for name in PARAMETERS}
        if names["w1"] in params:
            found[layer] = {name: params[n] for name, n in names.items()}
    return GateWeights.of(found) if found else None


def weight_bytes(units: int, hidden: int) -> int:
    """Bytes of one layer's network, which every decision reads: w1 in bfloat16, the rest in float32."""
    return 2 * units * 2 * hidden + 4 * (2 * units + 1)


def _layer(params: Mapping[str, Tensor]) -> LayerWeights:
    rest = {name: params[name].detach().float().contiguous() for name in PARAMETERS[1:]}
    return LayerWeights(w1=params["w1"].detach().to(torch.bfloat16).contiguous(), **rest)


def _problems(layer: int, params: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with one layer's tensors."""
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


def _digest(layers: Mapping[int, LayerWeights]) -> str:
    digest = hashlib.sha256()
    for layer, weights in sorted(layers.items()):
        for name, tensor in weights.params().items():
            digest.update(f"{layer}.{name}.{tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _ranges(layers: Mapping[int, LayerWeights]) -> str:
    return ", ".join(str(layer) for layer in sorted(layers))
