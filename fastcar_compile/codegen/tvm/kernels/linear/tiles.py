"""What linear kernels share: their arguments, the active rows of activations, and tiles of these with weight rows."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, intrinsic, ramp
from fastcar_compile.ir.ops.linear import GROUP

SMALL_BATCH = 8
"""The most rows of x for a kernel of few rows. Up to here the arithmetic per weight hides behind the memory."""

PARALLEL_WEIGHTS = 1 << 18
"""Weights from which a second thread pays for launching and awaiting a parallel region, which takes about 3 us. One
thread reads 2^18 int8 weights from the last-level cache in about 10 us."""

WeightType = Literal["float32", "bfloat16", "float16"]


def integer_linear(kind: Literal["int8", "int4"], suffix: str, sizes: tuple[int, int, int], body: Any) -> PrimFunc:
    """Return the kernel of the arguments q int8 [m, k], s float32 [m], w, ws, and the result y float32 [m, n].

    suffix: of its name. sizes: (m, n, k). body: the macro (q, s, w, ws, y).
    """
    m, n, k = sizes
    groups = -(-k // GROUP)
    weights, scales = ((n, groups * GROUP // 2), "uint8"), ((n, groups), "float16")
    if kind == "int8":
        weights, scales = ((n, k), "int8"), ((n,), "float32")

    @script.prim_func(private=True, s_tir=True)
    def linear(
        q: T.Buffer((m, k), "int8"),
        s: T.Buffer((m,), "float32"),
        w: T.Buffer(*weights),
        ws: T.Buffer(*scales),
        y: T.Buffer((m, n), "float32"),
    ):
        with T.sblock("product"):
            script.access([q, s, w, ws], [y])
            body(q, s, w, ws, y)

    cast("Any", linear).__name__ = f"linear_i{kind[3:]}{suffix}"
    return linear


def float_linear(name: str, dtype: WeightType, sizes: tuple[int, int, int], body: Any) -> PrimFunc:
    """Return the kernel of the arguments x float32 [m, k], w [n, k] of `dtype`, and the result y float32 [m, n].

    sizes: (m, n, k). body: the macro (x, w, y).
    """
    m, n, k = sizes

    @script.prim_func(private=True, s_tir=True)
    def linear(x: T.Buffer((m, k), "float32"), w: T.Buffer((n, k), dtype), y: T.Buffer((m, n), "float32")):
        with T.sblock("product"):
            script.access([x, w], [y])
            body(x, w, y)

    cast("Any", linear).__name__ = name
    return linear


# The active rows of activations, and the tiles of their products with weight rows.
#
# A row that replays is zero, so a zero row is inactive: no kernel multiplies it.


SCAN_LANES = 16


def active_rows(m: int) -> Any:
    """Allocate the numbers of the active rows, `rows` [m], and `count` [1], how many they are."""
    return script.temporaries(rows=(m, "int32"), count=(1, "int32"))


@script.inlined
def append_active(active, i):
    """Append row i to the active rows."""
    active.rows[active.count[0]] = i
    active.count[0] += 1


@script.inlined
def or_int8(q, i, k, bits):
    """Write the bitwise or of row i of q int8 [m, k] to bits uint32 [16]."""
    found = T.alloc_buffer((SCAN_LANES,), "int8")
    found[ramp(0, SCAN_LANES)] = T.Broadcast(T.int8(0), SCAN_LANES)
    # c: 16 bytes at a time. found stays in a register, and a row is read once.
    for c in range(k // SCAN_LANES):
        found[ramp(0, SCAN_LANES)] = T.bitwise_or(found[ramp(0, SCAN_LANES)], q[i, ramp(c * SCAN_LANES, SCAN_LANES)])
    for t in range(k % SCAN_LANES):
        found[0] = T.bitwise_or(found[0], q[i, k // SCAN_LANES * SCAN_LANES + t])
    # 32-bit lanes, so that `is_zero` is one reduction for both types of rows.
    bits[ramp(0, SCAN_LANES)] = T.Cast(f"uint32x{SCAN_LANES}", found[ramp(0, SCAN_LANES)])


@script.inlined
def or_float32(x, i, k, bits):
    """Write the bitwise or of row i of x float32 [m, k] to bits uint32 [16], without signs: -0 is zero too."""
    bits[ramp(0, SCAN_LANES)] = T.Broadcast(T.uint32(0), SCAN_LANES)
    for c in range(k // SCAN_LANES):
        bits[ramp(0, SCAN_LANES)] = T.bitwise_or(
            bits[ramp(0, SCAN_LANES)],
            T.shift_left(
                T.reinterpret(f"uint32x{SCAN_LANES}", x[i, ramp(c * SCAN_LANES, SCAN_LANES)]),
                T.Broadcast(T.uint32(1), SCAN_LANES),
            ),
        )
    for t in range(k % SCAN_LANES):
        bits[0] = T.bitwise_or(
            bits[0], T.shift_left(T.reinterpret("uint32", x[i, k // SCAN_LANES * SCAN_LANES + t]), T.uint32(1))
        )


def is_zero(bits: Expr) -> Expr:
    """Return whether bits uint32 [16] are all zero."""
    return intrinsic("uint32", f"llvm.vector.reduce.or.v{SCAN_LANES}i32", bits[ramp(0, SCAN_LANES)]) == T.uint32(0)


def _of_zero_row(o: Any, i: Expr, j: Expr) -> Expr:
    """Return the rounding steps of the formula: a scale that is no number stays visible."""
    if not hasattr(o, "s"):
        return T.float32(0)
    # A scale per channel is float32 [n], one per group is [n, G].
    return T.float32(0) * (o.s[i] * o.ws[j] if len(o.ws.shape) == 1 else o.s[i])


@script.inlined
def find_active(o, shape, active, found, scan=T.serial):
    """List the active rows of o.q [m, k], int8 or float32; write the results of the others. `shape` is (m, n, k).

    found: what is called with (o, row, its place among the active rows) for each of them. scan: the loop of the search,
    which may be parallel; the list is made in order.
    """
    zero = T.alloc_buffer((shape[0],), "int32")
    for i in scan(shape[0]):
        zero[i] = 0
        # A single row is multiplied without a search for zeros.
        if shape[0] > 1:
            bits = T.alloc_buffer((SCAN_LANES,), "uint32")
            if hasattr(o, "s"):
                or_int8(o.q, i, shape[2], bits)
            else:
                or_float32(o.q, i, shape[2], bits)
            zero[i] = T.Cast("int32", is_zero(bits))
    active.count[0] = 0
    for i in range(shape[0]):
        if zero[i] != 0:
            # No tile covers an inactive row, so its results are written here.
            for j in range(shape[1]):
                o.y[i, j] = _of_zero_row(o, i, j)
        else:
            found(o, i, active.count[0])
            append_active(active, i)


def nothing(*_: Any) -> None:
    """Do nothing for an active row."""


@dataclass(frozen=True)
class Tile:
    """The outputs of `rows` weight rows from j on by `columns` active rows from number i on, row-major."""

    j: Any
    i: Any
    rows: int
    columns: int
    active: Any

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return self.rows * self.columns

    def weight_row(self, output: Expr) -> Expr:
        """Return the weight row of an output."""
        return self.j + output // self.columns

    def place(self, output: Expr) -> Expr:
        """Return the position of an output's row among the active rows."""
        return self.i + output % self.columns

    def active_row(self, output: Expr) -> Expr:
        """Return the row of an output."""
        return self.active.rows[self.place(output)]


@dataclass(frozen=True)
class RowTiling:
    """n weight rows in tiles of `rows` by `columns`; `loop` is T.parallel or T.serial.

    together: active rows that do not fill a tile are one tile too, for which each number of them has its own code.
    """

    n: int
    rows: int
    columns: int
    loop: Any
    together: bool = False


@script.inlined
def _multiply_rest(tiling, multiply, o, active, j, first, rest, _number):
    if active.count[0] % tiling.columns == rest:
        multiply(o, Tile(j, first, tiling.rows, rest, active))


@script.inlined
def for_tiles(tiling, multiply, o, active):
    """Call multiply(o, tile) for the tiles of all weight rows and all active rows.

    The outer loop, which may be parallel, goes over weight rows. Those of one iteration meet every active row, so each
    weight is read from memory once. Remainders are tiles of few active rows, or of the last weight rows.
    """
    # jo: tiles of weight rows. io: tiles of active rows, which meet the weights while these are in the cache.
    for jo in tiling.loop(tiling.n // tiling.rows):
        for io in range(active.count[0] // tiling.columns):
            multiply(o, Tile(jo * tiling.rows, io * tiling.columns, tiling.rows, tiling.columns, active))
        whole = T.meta_var(active.count[0] // tiling.columns * tiling.columns)
        if tiling.together:
            script.each(_multiply_rest, range(1, tiling.columns), tiling, multiply, o, active, jo * tiling.rows, whole)
        elif tiling.columns > 1:
            for io in range(active.count[0] % tiling.columns):
                multiply(o, Tile(jo * tiling.rows, whole + io, tiling.rows, 1, active))
    # Weight rows that do not fill a tile, after the loop: they are fewer than one iteration's.
    if tiling.n % tiling.rows > 0:
        for io in range(active.count[0]):
            multiply(o, Tile(tiling.n // tiling.rows * tiling.rows, io, tiling.n % tiling.rows, 1, active))
