"""Instruction sets and weight types of `blocks` as data: a new one of either is a row of a table here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import vectors
from fastcar_compile.codegen.tvm.kernels.linear.dots import HALF, nibbles, signed_nibbles
from fastcar_compile.codegen.tvm.kernels.linear.tiles import SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, Expr, flip_sign, intrinsic, ramp, vpdpbusd
from fastcar_compile.ir.ops.linear import GROUP


@dataclass(frozen=True)
class Product:
    """How an instruction multiplies a vector of x with one of weights, and adds to a vector of sums.

    Args:
        rows, across: rows of x by weight rows of the sums; lane r * across + w is that of row r and weight row w.
        unit: bytes of a row of x, or of a weight row, that a lane multiplies.
        copies: how often each row stands in a vector of x. `across` where lanes are multiplied with lanes.
        sums: type of a sum.
        add: (sums, x int8 [width], weights int8 [across * unit]) -> sums.
        unsigned: whether weights are unsigned: a type's `offset` is added, and the sums begin with what it adds.
    """

    rows: int
    across: int
    unit: int
    copies: int
    sums: Literal["int32", "float32"]
    add: Callable[[Expr, Expr, Expr], Expr]
    unsigned: bool = False

    @property
    def lanes(self) -> int:
        """Sums of a vector."""
        return self.rows * self.across

    @property
    def width(self) -> int:
        """Bytes of a vector."""
        return self.rows * self.copies * self.unit


def _vpdpbusd(across: int) -> Callable[[Expr, Expr, Expr], Expr]:
    def add(acc: Expr, x: Expr, w: Expr) -> Expr:
        lanes = T.reinterpret("int32" if across == 1 else f"int32x{across}", w)
        every = T.Broadcast(lanes, 16) if across == 1 else T.Shuffle([lanes] * (16 // across), [*range(16)])
        return vpdpbusd(acc, T.reinterpret("int8x64", every), x, 64)

    return add


def _smmla(acc: Expr, x: Expr, w: Expr) -> Expr:
    # The lanes are x0 w0, x0 w1, x1 w0, x1 w1.
    return intrinsic("int32x4", "llvm.aarch64.neon.smmla.v4i32.v16i8", acc, x, w)


_DOT, _ROUND = "fastcar_dot_bfloat16", "fastcar_round_bfloat16"


def _bridge(intrinsic_name: str, lanes: int, inputs: int) -> str:
    """Return LLVM code: TVM has no values of LLVM's type bfloat, which the intrinsic takes."""
    sums, bytes, pairs = f"<{lanes} x float>", f"<{4 * lanes} x i8>", f"<{2 * lanes} x bfloat>"
    return f"""
declare {sums} @{intrinsic_name}({sums}, {pairs}, {pairs})
define {sums} @{_DOT}({sums} %sum, {bytes} %x, {bytes} %w) {{
  %a = bitcast {bytes} %x to {pairs}
  %b = bitcast {bytes} %w to {pairs}
  %y = call {sums} @{intrinsic_name}({sums} %sum, {pairs} %a, {pairs} %b)
  ret {sums} %y
}}
define <{2 * inputs} x i8> @{_ROUND}(<{inputs} x float> %x) {{
  %a = fptrunc <{inputs} x float> %x to <{inputs} x bfloat>
  %y = bitcast <{inputs} x bfloat> %a to <{2 * inputs} x i8>
  ret <{2 * inputs} x i8> %y
}}
"""


BRIDGES = {
    "bfmmla": _bridge("llvm.aarch64.neon.bfmmla", lanes=4, inputs=4),
    "vdpbf16ps": _bridge("llvm.x86.avx512bf16.dpbf16ps.512", lanes=16, inputs=2),
}


def _bfmmla(acc: Expr, x: Expr, w: Expr) -> Expr:
    return T.call_pure_extern("float32x4", _DOT, acc, x, w)


def vdpbf16ps(acc: Expr, x: Expr, w: Expr) -> Expr:
    """Return float32 [16] plus two products each: of bfloat16 [32] as int8 [64], and of two weights as int8 [4]."""
    every = T.Broadcast(T.reinterpret("float32", w), 16)
    return T.call_pure_extern("float32x16", _DOT, acc, x, T.reinterpret("int8x64", every))


FOURS = Product(4, 4, 4, 4, "int32", _vpdpbusd(4), unsigned=True)
COLUMNS = Product(16, 1, 4, 1, "int32", _vpdpbusd(1), unsigned=True)
SMMLA = Product(2, 2, 8, 1, "int32", _smmla)
BFMMLA = Product(2, 2, 8, 1, "float32", _bfmmla)
PAIRS = Product(16, 1, 4, 1, "float32", vdpbf16ps)


@dataclass(frozen=True)
class Format:
    """A type of weights.

    Args:
        bits: of a weight.
        offset: what is added to a weight to make it unsigned.
        unpack: int8 [width] of packed weights, width, whether to add `offset` -> vectors of `Product.add`.
    """

    bits: int
    offset: int
    unpack: Callable[[Expr, int, bool], Sequence[Expr]]


def _unpack_int4(value: Expr, width: int, unsigned: bool) -> Sequence[Expr]:
    return (nibbles if unsigned else signed_nibbles)(lambda *_: T.reinterpret(f"uint8x{width}", value), 0, width)


FORMATS = {
    "int8": Format(8, 128, lambda value, width, unsigned: [flip_sign(value, width) if unsigned else value]),
    "int4": Format(4, 8, _unpack_int4),
    "bfloat16": Format(16, 0, lambda value, *_: [value]),
}


@dataclass(frozen=True)
class Tiling:
    """Tiles of `sets` times `across` weight rows by `vectors` of rows of x.

    Args:
        panel: tiles of weight rows that are unpacked once and meet all rows of x while they are in the second-level
            cache. 0: a tile is unpacked line by line while it is multiplied.
        rests: numbers of vectors that may remain.
        n, k: weight rows and inputs.
    """

    product: Product
    kind: Literal["int8", "int4", "bfloat16"]
    sets: int
    vectors: int
    rests: range
    panel: int
    n: int
    k: int

    @property
    def format(self) -> Format:
        """Of the weights."""
        return FORMATS[self.kind]

    @property
    def twos(self) -> bool:
        """Whether there are three vectors or more, in tiles of three and of two.

        Measured: where four remain, two tiles of two take less time than one of three and one of one.
        """
        return self.vectors == 3 and len(self.rests) == 0

    @property
    def together(self) -> int:
        """Tiles of weight rows of an iteration."""
        return max(self.panel, 1)

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return min(self.sets * self.product.across, self.n)

    @property
    def line(self) -> int:
        """Elements of a weight row that are transposed and unpacked at a time: a vector."""
        return self.product.width * 8 // max(self.format.bits, 8)

    @property
    def parts(self) -> int:
        """Weights of a byte."""
        return 8 // min(self.format.bits, 8)

    @property
    def units(self) -> int:
        """Units of a line before it is unpacked."""
        return self.product.width // self.product.unit

    @property
    def steps(self) -> int:
        """Steps of a line."""
        return self.units * self.parts

    @property
    def inputs(self) -> int:
        """Inputs of a step."""
        return self.product.unit * 8 // max(self.format.bits, 8)

    @property
    def steps_loop(self) -> Any:
        """The loop over a line's sets or steps: unrolled where its vectors of weights fit registers."""
        return T.unroll if self.product.width < LINE else T.serial

    @property
    def groups(self) -> int:
        """Sums of an output, each with a scale of its own."""
        return -(-self.k // GROUP) if self.kind == "int4" else 1

    @property
    def lines(self) -> int:
        """Lines of a group."""
        return HALF // self.line if self.kind == "int4" else -(-self.k // self.line)

    @property
    def piece(self) -> int:
        """Steps after which their order repeats: of a group of int4, of a line otherwise."""
        return self.steps * (self.lines if self.kind == "int4" else 1)

    def place(self, step: Expr) -> Expr:
        """Return where step `step` of a piece stands, in the order in which weights are unpacked."""
        across, whole = self.product.across, self.piece // self.parts
        # Four transposed vectors have every fourth step each. The first part of a line comes before its second.
        at = step % self.units
        order = step % whole // self.units * self.steps + step // whole * self.units
        return order + at % across * (self.units // across) + at // across

    def begin(self, number: Expr, size: int) -> Expr:
        """Return where a line, or its inputs, begin. The last line ends with the row: what it has again meets zeros."""
        return number * size if self.kind == "int4" else T.min(number * size, self.k - size)

    def first_row(self, panel: Expr, t: Expr) -> Expr:
        """Return the first weight row of a tile. The last tile overlaps the one before, so that its rows exist."""
        return T.min((panel * self.together + t) * self.rows, self.n - self.rows)

    @property
    def ahead(self) -> int:
        """Weight rows of the prefetch distance."""
        rows, size = self.together * self.rows, self.groups * self.lines * self.product.width
        return max(rows, vectors.prefetch_distance(rows, size)[0])

    def row(self, j: Expr, number: Expr) -> Expr:
        """Return a weight row of the tile from j on. Of fewer weight rows than a tile has the last one is repeated."""
        return j + (number if self.rows < self.n else T.min(number, self.n - 1))

    def take(self, x: Any, row: Expr, start: Expr) -> Expr:
        """Return a step of a row of x, int8 or float32, as bytes and as often as a vector has it."""
        value, copies = x[row, ramp(start, self.inputs)], self.product.copies
        if self.kind == "bfloat16":
            return T.call_pure_extern(f"int8x{self.product.unit}", _ROUND, value)
        if copies == 1:
            return value
        return T.reinterpret(f"int8x{4 * copies}", T.Broadcast(T.reinterpret("int32", value), copies))

    def scales(self, ws: Any, j: Expr, q: Expr) -> Expr:
        """Return ws float32 [n] of set q of the tile from j on."""
        scales = [ws[self.row(j, self.product.across * q + v)] for v in range(self.product.across)]
        return vectors.vector_of(scales) if len(scales) > 1 else scales[0]

    def for_all_rows(self, values: Expr) -> Expr:
        """Return a number of each of `across` weight rows in the lanes of a vector of sums."""
        if self.product.across == 1:
            return T.Broadcast(values, self.product.rows)
        return T.Shuffle([values] * self.product.rows, [*range(self.product.lanes)])


_MANY = [(SMALL_BATCH, FOURS, 6, 4, 0), (16, COLUMNS, 12, 2, 0), (32, COLUMNS, 8, 3, 8)]

TILES: dict[tuple[str, str], Sequence[tuple[int, Product, int, int, int]]] = {
    ("smmla", "int8"): [(0, SMMLA, 4, 4, 0)],
    ("smmla", "int4"): [(0, SMMLA, 2, 4, 0)],
    ("bfmmla", "bfloat16"): [(0, BFMMLA, 4, 4, 0)],
    ("vdpbf16ps", "bfloat16"): [(0, PAIRS, 12, 2, 0), (32, PAIRS, 8, 3, 0)],
    **{(name, "int8"): _MANY for name in ("vnni512", "amx")},
    **{(name, "int4"): [(0, FOURS, 12, 2, 0), *_MANY] for name in ("vnni512", "amx")},
}
"""(instruction, weights) -> for more than so many active rows: product, sets, vectors and panel of a `Tiling`.

Measured: int8 is as fast in dot products along the reduction up to SMALL_BATCH rows. On Arm 4 x 4 blocks of int32 sums
leave registers for weights and x; a block of int4 has float32 totals too, so there are half as many.
"""


def multiplies(kind: str, n: int, k: int, isa: InstructionSet) -> bool:
    """Return whether `linear_blocks` takes n weight rows of k inputs."""
    if kind == "bfloat16":
        return (isa.bfloat16 == "bfmmla" and k % 8 == 0) or (isa.bfloat16 == "vdpbf16ps" and n >= 32 and k % 32 == 0)
    if isa.int8 == "smmla":
        return kind == "int4" or k % SMMLA.width == 0
    return isa.int8 in ("vnni512", "amx") and n >= 16 and k % 4 == 0 and (kind == "int4" or k >= LINE)


def tilings_of(kind: Any, m: int, n: int, k: int, isa: InstructionSet) -> list[tuple[int, Tiling]]:
    """Return what at most m rows need: the most active rows of each, in ascending order."""
    table = TILES[isa.bfloat16 if kind == "bfloat16" else isa.int8, kind]
    chosen = []
    for (above, product, sets, most, panel), end in zip(table, [*(row[0] for row in table[1:]), m], strict=True):
        if above < m:
            blocks, end = -(-min(m, end) // product.rows), min(m, end)
            most, sets = min(most, blocks), min(sets, -(-n // product.across))
            least = above // product.rows + 1
            rests = range(least if blocks <= most or most == 3 <= least else 1, most)
            chosen.append((end, Tiling(product, kind, sets, most, rests, panel, n, k)))
    return chosen
