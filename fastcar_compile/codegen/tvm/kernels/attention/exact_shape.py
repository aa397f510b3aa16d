"""What the parts of exact attention share: products of int16, the shape, and the temporaries of one query row."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import script, vectors
from fastcar_compile.codegen.tvm.kernels.cache import exponent_of
from fastcar_compile.codegen.tvm.kernels.tas import NOT_A_NUMBER
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, broadcast, cast, ramp
from fastcar_compile.ir import exact
from fastcar_compile.ir.ops.operator import BLOCK, LEAST_EXPONENT

LANES = 16
"""Numerators of a vector."""

ROWS = 4
"""Cache rows that meet the query together."""

UNSEEN = -1
"""Numerator of a cache row that the query does not see."""


@dataclass(frozen=True)
class Int16Dot:
    """How products of int16 are added in int32: `step`(sums, factors, factors), `pair` neighbouring ones in a lane."""

    lanes: int
    pair: int
    step: Callable[[Expr, Expr, Expr], Expr]

    @property
    def width(self) -> int:
        """Factors of a step."""
        return self.lanes * self.pair

    def packed(self, numbers: Sequence[Expr]) -> Expr:
        """Return `pair` vectors of int32 within int16 as one, which has the factors of a lane together."""
        return numbers[0] if self.pair == 1 else numbers[0] & 0xFFFF | numbers[1] << 16

    def widened(self, values: Expr, count: int) -> Expr:
        """Return int8 as int32, which have `pair` neighbouring ones as factors."""
        if self.pair == 1:
            return cast("int32", values, count)
        return T.reinterpret(f"int32x{count // self.pair}", cast("int16", values, count))

    def add(self, acc: Expr, a: Expr, b: Expr) -> Expr:
        """Return `step` of int32 that have the factors."""
        if self.pair == 1:
            return self.step(acc, a, b)
        return self.step(acc, *(T.reinterpret(f"int16x{self.width}", factors) for factors in (a, b)))


def _pairs(lanes: int, name: str) -> Int16Dot:
    return Int16Dot(lanes, 2, lambda acc, a, b: acc + vectors.intrinsic(f"int32x{lanes}", name, a, b))


def _singles(lanes: int) -> Int16Dot:
    return Int16Dot(lanes, 1, lambda acc, a, b: acc + cast("int32", a, lanes) * cast("int32", b, lanes))


DOTS: dict[str, Int16Dot] = {
    **dict.fromkeys(("avx512-amx", "avx512-bf16", "avx512-vnni"), _pairs(16, "llvm.x86.avx512.pmaddw.d.512")),
    "avx2-vnni": _pairs(8, "llvm.x86.avx2.pmadd.wd"),
    "avx2": _pairs(8, "llvm.x86.avx2.pmadd.wd"),
    "sse4": _pairs(4, "llvm.x86.sse2.pmadd.wd"),
    "wasm-simd128": _pairs(4, "llvm.wasm.dot"),
}
"""By instruction set; others multiply lane by lane."""


def dot_of(isa: InstructionSet, d: int, lanes: int) -> Int16Dot:
    """Return steps that no block's end cuts; `lanes`: where factors are not in pairs."""
    found = DOTS.get(isa.name)
    return found if found and d % BLOCK == 0 else _singles(lanes)


def tiles_of(rows: Any) -> Any:
    """Return the tiles that hold so many rows."""
    return (rows + BLOCK - 1) // BLOCK


@dataclass(frozen=True)
class ExactShape:
    """D, S, (sinks, window) of a ring cache, and what a product of query and key is multiplied by."""

    d: int
    s: int
    window: tuple[int, int] | None
    factor: float
    isa: InstructionSet = PORTABLE

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.d // BLOCK)

    @property
    def dot(self) -> Int16Dot:
        """How a vector of a row is multiplied."""
        return dot_of(self.isa, self.d, vectors.vector_lanes(self.d))

    @property
    def run(self) -> int:
        """Columns of values that are loaded together."""
        return max(self.dot.lanes, BLOCK // 2) if self.d % BLOCK == 0 else self.dot.lanes

    @property
    def highest(self) -> int:
        """Return the largest exponent of a product with which no logit is infinite: a block's sum is below 2^26."""
        return 126 - 26 - self.blocks.bit_length() - max(0, math.frexp(self.factor)[1])

    def sees(self, row: Expr, position: Expr, newest: Expr) -> Expr:
        """Return whether the token at `position` sees a vector of cache rows, in a cache written up to `newest`."""

        def each(value: Any) -> Expr:
            return T.Broadcast(T.Cast("int32", value), ROWS)

        if self.window is None:
            return row <= each(position)
        sinks, size = self.window
        ring = self.s - sinks
        # last: the ring's row of the newest position. Rows behind it are one turn older.
        last = T.truncmod(T.max(newest - sinks, 0), ring)
        behind = T.Select(row > each(last + sinks), each(ring), each(0))
        held = row + each(newest - last - sinks) - behind
        # A row that holds a position below `sinks` was never written in the ring.
        # Positions up to position - size are outside the window.
        recent = T.And(T.And(held >= each(sinks), held > each(position - size)), held <= each(position))
        return T.Or(T.And(row < each(sinks), row <= each(position)), T.And(row >= each(sinks), recent))


def row_buffers(shape: ExactShape) -> Any:
    """Allocate the temporaries of one query row."""
    held, n = tiles_of(shape.s) * BLOCK, shape.blocks
    return script.temporaries(
        # One logit and one numerator per cached row, rounded up to whole tiles of 32 rows.
        logits=(held, "float32"),
        weights=(held, "int32"),
        # One tile of rows: numerators times powers of two, and these as a wide block with its exponent.
        scaled=(BLOCK, "float32"),
        integers=(BLOCK + 1, "int32"),
        factors=(BLOCK, "int16"),
        parts=(BLOCK, "int16"),
        # The sums of a block of columns, and of a logit.
        acc=(BLOCK, "int32"),
        # Four rows: their sums, the exponents of a block, logits, which are seen, and maxima.
        four=(ROWS, "int32"),
        exponents=(ROWS, "int32"),
        powers=(ROWS, "int32"),
        total=(ROWS, "float32"),
        seen=(ROWS, "int32"),
        unknown=(ROWS, "int32"),
        most=(ROWS, "float32"),
        # stat: the maximum of the logits, and the inverse of the sum.
        # count: the sum of the numerators, exact in int64.
        stat=(2, "float32"),
        count=(1, "int64"),
        # out: the weighted values in whole blocks. columns: 1 where a block of columns is NaN.
        out=(n * BLOCK, "float32"),
        columns=(n, "int32"),
        # 16 numerators: their exponents in base 2, what the table has around them, and the numerators.
        units=(LANES, "int32"),
        low=(LANES, "int32"),
        high=(LANES, "int32"),
        power=(LANES, "int32"),
    )


def wide_exponent(bits: Expr, lanes: int = 1) -> Expr:
    """Return the exponent of a wide block whose largest magnitude has these bits."""
    # The carry is where the largest mantissa would round up to 2^14.
    return T.max(exponent_of(bits, exact.WIDE_BITS, lanes), broadcast(T.int32(LEAST_EXPONENT), lanes))


def not_a_number() -> Expr:
    return T.reinterpret("float32", T.int32(NOT_A_NUMBER))


def mantissas(cache: Any, at: tuple[Expr, ...], start: Expr, width: int) -> Expr:
    """Return int8 mantissas of a cached row as int16."""
    return cast("int16", cache[(*at, ramp(start, width))], width)
