"""Peak arithmetic of this CPU: multiply-accumulates in registers alone, on all threads."""

# pyright: reportInvalidTypeForm=false, reportMissingModuleSource=false
# TVMScript annotates buffers with calls; tvm.script.tirx is made when tvm is imported.

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import NATIVE, InstructionSet, instruction_sets
from fastcar_compile.codegen.tvm.kernels.linear import products
from fastcar_compile.codegen.tvm.kernels.linear.dots import DOTS
from fastcar_compile.codegen.tvm.kernels.vectors import Expr
from fastcar_compile.codegen.tvm.target import host_target

CHAINS = 12
"""Accumulators: more than latency times the units that multiply, and not more than there are registers."""

STEPS = 1 << 20
"""Steps of each chain in one call."""


@dataclass(frozen=True)
class _Unit:
    """One instruction: a chain's vector is `lanes` of `dtype`, and `step` adds `macs` products to it."""

    dtype: str
    lanes: int
    macs: int
    step: Callable[[Expr], Expr]


def _float_unit(isa: InstructionSet) -> _Unit:
    lanes = isa.float_lanes
    half = T.Broadcast(T.float32(0.5), lanes)
    return _Unit("float32", lanes, lanes, lambda acc: acc * half + half)


def _bfloat16_unit() -> _Unit:
    """vdpbf16ps, which AVX-512 BF16 has: two products per float32 lane."""
    one = T.int8(1)
    return _Unit("float32", 16, 32, lambda acc: products.vdpbf16ps(acc, T.Broadcast(one, 64), T.Broadcast(one, 4)))


def _int8_unit(isa: InstructionSet) -> _Unit:
    """The int8 products of our kernels. The accumulator is an operand, so LLVM leaves every product in the loop."""
    dot = DOTS["int8"][isa.int8]

    def step(acc: Expr) -> Expr:
        weights, activations = lambda _o, n: T.Broadcast(T.int8(1), n), lambda _o, n: _bytes(acc, dot.lanes, n)
        return dot.step(acc, weights, activations)

    return _Unit("int32", dot.lanes, dot.width, step)


def _bytes(acc: Expr, lanes: int, count: int) -> Expr:
    """Return `count` bytes of a vector of int32."""
    every = T.reinterpret(f"int8x{4 * lanes}", acc)
    return every if count == 4 * lanes else T.Shuffle([every], list(range(count)))


def _kernel(unit: _Unit, threads: int, imported: str) -> Any:
    """Return a kernel in which each thread advances CHAINS vectors STEPS times: y [threads, CHAINS * lanes]."""
    lanes, dtype, step = unit.lanes, unit.dtype, unit.step
    size = CHAINS * lanes

    @T.prim_func(s_tir=True)
    def peak(x: T.Buffer((threads, size), dtype), y: T.Buffer((threads, size), dtype)):
        T.func_attr({"tir.noalias": True, "global_symbol": "peak"})
        for p in T.parallel(threads):
            with T.sblock("chains"):
                T.reads(x[0:threads, 0:size])
                T.writes(y[0:threads, 0:size])
                with T.attr(0, "pragma_import_llvm", imported):
                    acc = T.alloc_buffer((size,), dtype)
                    for u in T.unroll(CHAINS):
                        acc[T.Ramp(u * lanes, 1, lanes)] = x[p, T.Ramp(u * lanes, 1, lanes)]
                    for _i in range(STEPS):
                        for u in T.unroll(CHAINS):
                            acc[T.Ramp(u * lanes, 1, lanes)] = step(acc[T.Ramp(u * lanes, 1, lanes)])
                    for u in T.unroll(CHAINS):
                        y[p, T.Ramp(u * lanes, 1, lanes)] = acc[T.Ramp(u * lanes, 1, lanes)]

    return peak


class Peak:
    """Multiplies through TVM's thread pool. Configure the pool before.

    Args:
        kind: "float32", "bfloat16" or "int8". For bfloat16 the faster of vdpbf16ps and float32's counts; AMX does not.
        host_cpu: the instruction set that multiplies.
    """

    def __init__(self, kind: str, threads: int, host_cpu: str = NATIVE) -> None:
        [isa] = instruction_sets([host_cpu], quant="bf16" if kind == "bfloat16" else "")
        self._calls: list[tuple[Callable[[], object], int]] = []
        if kind == "int8":
            self._add(_int8_unit(isa), isa, threads)
            return
        self._add(_float_unit(isa), isa, threads)
        if isa.for_bfloat16:
            self._add(_bfloat16_unit(), isa, threads, products.BRIDGES["vdpbf16ps"])

    def _add(self, unit: _Unit, isa: InstructionSet, threads: int, imported: str = "") -> None:
        module = tvm.IRModule({"peak": _kernel(unit, threads, imported)})
        run = tvm.compile(module, target=host_target(isa))["peak"]
        x, y = (tvm.runtime.tensor(np.ones((threads, CHAINS * unit.lanes), unit.dtype)) for _ in range(2))
        self._calls.append((lambda: run(x, y), threads * CHAINS * STEPS * unit.macs))

    def gigamacs_per_second(self, repeats: int) -> list[float]:
        """Return one figure per repeat, without the first."""
        found = []
        for _ in range(repeats + 1):
            figures = []
            for run, macs in self._calls:
                start = time.perf_counter()
                run()
                figures.append(macs / (time.perf_counter() - start) / 1e9)
            found.append(max(figures))
        return found[1:]
