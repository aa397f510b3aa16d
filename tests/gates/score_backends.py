"""The gates' scores on every backend: built once for a shape, then called with numpy arrays."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import tvm
from numpy.typing import NDArray
from onnx_export.test_ops import export

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.codegen.tvm.isa import InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.kernels.gate import input_delta
from fastcar_compile.codegen.tvm.kernels.learned_score import learned_score
from fastcar_compile.codegen.tvm.kernels.tas import tas
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.gates.base import FabricGate, GateInputs, ScoreConstants
from fastcar_compile.gates.input_delta import InputDeltaGate
from fastcar_compile.gates.learned import LearnedGate
from fastcar_compile.gates.scores import score_factor
from fastcar_compile.gates.tas import TasGate
from fastcar_compile.gates.weights import PARAMETERS

fastcar = torch.ops.fastcar
Array = NDArray[Any]
Score = Callable[[dict[str, Array]], Array]
"""The arrays of a gate by name -> float32 [B]."""

STRIDE, POSITION, SCALE = 4, 11, 0.3
CHOSEN, WEIGHTS = (1, 0), (2.0, -0.7)


@dataclass(frozen=True)
class Shape:
    """Rows, H, query and key heads, D and units."""

    rows: int = 3
    width: int = 64
    heads: int = 6
    kv_heads: int = 2
    dim: int = 8
    units: int = 5

    @property
    def query(self) -> tuple[int, int, int, int]:
        """Of the operator."""
        return self.rows, self.heads, 1, self.dim

    @property
    def cache(self) -> tuple[int, int, int, int]:
        """Of the operator."""
        return self.rows, self.kv_heads, POSITION + 1, self.dim


ARGUMENTS = {
    "input_delta": ("x", "cached"),
    "learned_score": ("x", "cached", "w1", "b1", "w2", "b2"),
    "tas_heads": ("query", "keys", "position"),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "input_delta": (),
    "learned_score": (),
    "tas_heads": (STRIDE, SCALE, list(CHOSEN), list(WEIGHTS)),
}


def tensor(name: str, array: Array) -> torch.Tensor:
    """An argument; the weights as bfloat16."""
    own = torch.from_numpy(np.array(array))
    return own.bfloat16() if name == "w1" else own


def eager(name: str) -> Score:
    """The operator."""
    operator = getattr(fastcar, name)
    return lambda arrays: operator(*(tensor(n, arrays[n]) for n in ARGUMENTS[name]), *OPTIONS[name]).numpy()


def compiled(name: str, shape: Shape, isa: InstructionSet | None = None) -> Score:
    """The TVM kernels."""
    isa = isa or host_instruction_set()
    if name == "tas_heads":
        kernel = tas(shape.query, shape.cache, STRIDE, SCALE, isa=isa, weighted=True)
    elif name == "learned_score":
        kernel = learned_score(shape.rows, shape.width, shape.units)
    else:
        kernel = input_delta(shape.rows, shape.width)
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    main = tvm.compile(module, target=host_target(isa))["main"]

    def score(arrays: dict[str, Array]) -> Array:
        given = [tvm.runtime.from_dlpack(tensor(n, arrays[n]).clone()) for n in ARGUMENTS[name]]
        if name == "tas_heads":
            factors = np.zeros(shape.heads, np.float32)
            factors[list(CHOSEN)] = WEIGHTS
            given = [*given, tvm.runtime.tensor(factors)]
        y = tvm.runtime.tensor(np.zeros(shape.rows, np.float32))
        main(*given, y)
        return y.numpy()

    return score


def exported(name: str, shape: Shape, path: Path) -> Score:
    """The ONNX definition in onnxruntime. Weights go in as float32, because numpy has no bfloat16."""
    example = {n: torch.zeros(s) for n, s in argument_shapes(shape).items()} | {"position": torch.tensor([POSITION])}
    names = ARGUMENTS[name]

    def score_of(*given: torch.Tensor) -> torch.Tensor:
        own = [t.bfloat16() if n == "w1" else t for n, t in zip(names, given, strict=True)]
        return getattr(fastcar, name)(*own, *OPTIONS[name])

    export(score_of, tuple(example[n] for n in names), (), path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = [i.name for i in session.get_inputs()]
    return lambda arrays: np.asarray(session.run(None, {i: arrays[n] for i, n in zip(inputs, names, strict=True)})[0])


def argument_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Of every float argument."""
    row, units = (shape.rows, shape.width), (shape.units,)
    network = {"w1": (*units, 2 * shape.width), "b1": units, "w2": units, "b2": (1,)}
    return {"x": row, "cached": row, "query": shape.query, "keys": shape.cache, **network}


def earlier_key(arrays: dict[str, Array]) -> Array:
    """float32 [B, Hkv, D]."""
    return arrays["keys"][:, :, POSITION - STRIDE]


GATES: dict[str, type[FabricGate]] = {"input_delta": InputDeltaGate, "learned_score": LearnedGate, "tas_heads": TasGate}
"""Operator -> the gate whose score it is."""


def reference(name: str) -> Score:
    """The definition in numpy and Python integers."""

    def score(arrays: dict[str, Array]) -> Array:
        query = arrays["query"][:, :, 0] if "query" in arrays else None
        key = earlier_key(arrays) if "keys" in arrays else None
        network = tuple(arrays[n] for n in PARAMETERS) if "w1" in arrays else None
        heads = 1 if query is None else query.shape[1]
        factors = [dict(zip(CHOSEN, WEIGHTS, strict=True)).get(head, 0.0) for head in range(heads)]
        inputs = GateInputs(query, key, arrays.get("x"), arrays.get("cached"))
        return GATES[name].exact_score(inputs, ScoreConstants(score_factor(SCALE, 1), factors, network))

    return score


def call(function: Any, *arguments: Any) -> None:
    """Call with arrays as pointers; floats and integers by value."""
    given = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
    function.restype = None
    function(*given)
