"""What GEMMs with int8 rows share, where a vector holds one sum of 16 rows: rows of x in fours, and results as rows.

The active rows of x are moved once, in blocks of 16: four inputs of each row beside each other. So four inputs of a
weight row are one broadcast, which vpdpbusd multiplies with 16 rows, and no sum across lanes is needed.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.vectors import LINE, Expr, intrinsic, load_from, prefetch, ramp, vector

SMALL_BATCH = 8
"""The most rows of x for a kernel of few rows. Up to here the arithmetic per weight hides behind the memory."""

PARALLEL_WEIGHTS = 1 << 18
"""Weights from which a second thread pays for launching and awaiting a parallel region, which takes about 3 us. One
thread reads 2^18 int8 weights from the last-level cache in about 10 us."""

WeightType = Literal["float32", "bfloat16", "float16"]

LANES = 16
FOUR = 4
WIDTH = LANES * FOUR
"""Bytes of a vector."""

WEIGHT_ROWS = 8
"""Weight rows of a tile."""

VECTORS = 3
"""Most blocks of x of a tile: 24 sums, which leave registers for three vectors of x and one of a weight."""

SUMS = WEIGHT_ROWS * LANES
"""Sums of a block of a tile."""

PANEL = 8
"""Tiles of weight rows that meet a tile of x while both are in the second-level cache."""

PANEL_ROWS = PANEL * WEIGHT_ROWS


def holds(n: int, k: int, isa: InstructionSet) -> bool:
    """Return whether a GEMM with vectors of rows takes n weight rows of k inputs."""
    return isa.int8 == "vnni512" and n >= WEIGHT_ROWS and k % FOUR == 0


def integer_linear(name: str, sizes: tuple[int, int, int], weights: Any, scales: Any, body: Any) -> PrimFunc:
    """Return the kernel of the arguments q int8 [m, k], s float32 [m], w, ws, and the result y float32 [m, n].

    sizes: (m, n, k). weights, scales: shapes and types of w and ws. body: the macro (q, s, w, ws, y).
    """
    m, n, k = sizes

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

    cast("Any", linear).__name__ = name
    return linear


def blocks_of(m: int, fours: int) -> Any:
    """Allocate active rows in blocks of 16; those beyond the last are copies of it.

    xt has `fours` times four inputs of each, `at` their numbers in x and y, and `scales` their scales.
    """
    blocks = -(-m // LANES)
    return script.temporaries(
        xt=(blocks, fours, WIDTH, "int8"), at=(blocks * LANES, "int32"), scales=(blocks * LANES, "float32")
    )


def spread(buffer: Any, row: Expr, start: Expr) -> Expr:
    """Return four bytes of a row in all lanes."""
    return T.reinterpret("int8x64", T.Broadcast(T.reinterpret("int32", buffer[row, ramp(start, FOUR)]), LANES))


@script.inlined
def move_rows(q, s, active, rows, block, k, flipped):
    """Move a block of active rows of q int8 [m, k] to `rows`. `flipped`: plus 128."""
    # i: 16 places of the block, of which those past the last active row repeat it.
    for i in range(LANES):
        rows.at[block * LANES + i] = active.rows[T.min(block * LANES + i, active.count[0] - 1)]
        rows.scales[block * LANES + i] = s[rows.at[block * LANES + i]]
    # piece: a cache line of every row, so that what is written stays in the first-level cache.
    for piece in range(-(-k // LINE)):
        for i in range(LANES):
            row: T.let = rows.at[block * LANES + i]
            # c: four inputs of row i go to bytes 4 i .. 4 i + 3 of a vector: to lane i of vpdpbusd.
            for c in range(LINE // FOUR):
                # The last line may end early. 4 divides k, so no four is cut.
                if piece * LINE + c * FOUR < k:
                    # An exclusive or with -128 inverts the sign bit, which adds 128.
                    rows.xt[block, piece * (LINE // FOUR) + c, ramp(i * FOUR, FOUR)] = T.bitwise_xor(
                        q[row, ramp(piece * LINE + c * FOUR, FOUR)], T.Broadcast(T.int8(-128 if flipped else 0), FOUR)
                    )


@script.inlined
def widen_scales(ws, row, factors, at, groups):
    """Write the float16 scales of a weight row as float32 to row `at` of `factors`."""
    # 16 scales at a time, then four, then one: G is any number.
    for v in range(groups // LANES):
        factors[at, vector(v, LANES)] = T.Cast("float32x16", ws[row, vector(v, LANES)])
    if groups % LANES >= FOUR:
        for v in range(groups % LANES // FOUR):
            factors[at, ramp(groups // LANES * LANES + v * FOUR, FOUR)] = T.Cast(
                "float32x4", ws[row, ramp(groups // LANES * LANES + v * FOUR, FOUR)]
            )
    for g in range(groups % FOUR):
        factors[at, groups // FOUR * FOUR + g] = T.Cast("float32", ws[row, groups // FOUR * FOUR + g])


def in_turn(a: Expr, b: Expr, run: int, half: int) -> Expr:
    """Return runs of `run` lanes of one half of two vectors of 16 in turn."""
    first = half * LANES // 2
    lanes = range(first, first + LANES // 2, run)
    return T.Shuffle([a, b], [which * LANES + lane + i for lane in lanes for which in (0, 1) for i in range(run)])


def _interleaved(buffer: Any, a: Expr, b: Expr, run: int, half: int) -> Expr:
    return in_turn(buffer[vector(a, LANES)], buffer[vector(b, LANES)], run, half)


@script.inlined
def store_blocks(y, rows, sums, index, first, vectors, place):
    """Write sums[*index] float32 [vectors, 8, 16] from vector `first` on, eight weight rows by blocks of x, to y.

    Three rounds of interleaving give runs of two, four and eight weight rows of one row of x.
    """
    for v in range(vectors):
        one, two = script.buffers(2, SUMS)
        # two: one vector per weight row, with 16 rows of x in its lanes.
        for p in T.unroll(WEIGHT_ROWS):
            two[vector(p, LANES)] = load_from(sums, index, (first + v * WEIGHT_ROWS + p) * LANES)(0, LANES)
        # First round: lanes of two weight rows in turn.
        for p in T.unroll(4):
            one[vector(p * 2, LANES)] = _interleaved(two, p * 2, p * 2 + 1, 1, 0)
            one[vector(p * 2 + 1, LANES)] = _interleaved(two, p * 2, p * 2 + 1, 1, 1)
        # Second round: runs of two lanes in turn, so four weight rows are together.
        for p in T.unroll(2):
            for h in T.unroll(2):
                two[vector(p * 4 + h * 2, LANES)] = _interleaved(one, p * 4 + h, p * 4 + 2 + h, 2, 0)
                two[vector(p * 4 + h * 2 + 1, LANES)] = _interleaved(one, p * 4 + h, p * 4 + 2 + h, 2, 1)
        # Third round: runs of four lanes in turn, so all eight weight rows of a row of x are together.
        for h in T.unroll(4):
            one[vector(h * 2, LANES)] = _interleaved(two, h, 4 + h, 4, 0)
            one[vector(h * 2 + 1, LANES)] = _interleaved(two, h, 4 + h, 4, 1)
        # i: rows of x. Eight adjacent columns are one store.
        for i in T.unroll(LANES):
            y[rows.at[(place.block + v) * LANES + i], ramp(place.j, WEIGHT_ROWS)] = one[
                ramp(i * WEIGHT_ROWS, WEIGHT_ROWS)
            ]


@dataclass(frozen=True)
class Place:
    """A tile: weight rows from j on, row `at` of the panel's temporaries, by blocks of x from `block` on."""

    j: Any
    at: Any
    block: Any


def first_row(panel: Expr, tile: Expr, n: int) -> Expr:
    """Return the first weight row of a tile: its eight rows exist."""
    # The last tile overlaps the one before where 8 does not divide n.
    return T.min(panel * PANEL_ROWS + tile * WEIGHT_ROWS, n - WEIGHT_ROWS)


@script.inlined
def prefetch_panel(w, place, byte):
    """Prefetch the cache lines from `byte` on of the next panel's weight rows; the first tile of x does so."""
    if place.block == 0:
        for r in T.unroll(WEIGHT_ROWS):
            T.evaluate(prefetch(w[place.j + PANEL_ROWS + r, byte]))


def most_blocks(m: int) -> int:
    """Return the blocks of x of a tile, for m rows."""
    return min(-(-m // LANES), VECTORS)


@script.inlined
def for_panel(panel, n, most, prepare, multiply, o, active):
    """Call the macros for the tiles of a panel of weight rows and all blocks of x.

    o: the operands, and the panel's temporaries. prepare: the macro (*o, j, at) for the eight weight rows from j on.
    multiply: the macro (blocks, *o, place) for a tile of so many blocks of x: `most`, or one. The last weight rows of
    an odd n are computed twice, with the same result.
    """
    for t in range(PANEL):
        if panel * PANEL_ROWS + t * WEIGHT_ROWS < n:
            prepare(*o, first_row(panel, t, n), t * WEIGHT_ROWS)
    blocks = T.meta_var((active.count[0] + LANES - 1) // LANES)
    # b: tiles of x. Each meets all weight rows of the panel before the next one.
    for b in range(blocks // most):
        for t in range(PANEL):
            if panel * PANEL_ROWS + t * WEIGHT_ROWS < n:
                multiply(most, *o, Place(first_row(panel, t, n), t * WEIGHT_ROWS, b * most))
    if most > 1:
        for b in range(blocks % most):
            for t in range(PANEL):
                if panel * PANEL_ROWS + t * WEIGHT_ROWS < n:
                    multiply(1, *o, Place(first_row(panel, t, n), t * WEIGHT_ROWS, blocks // most * most + b))


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
def find_active(o, shape, active, found):
    """List the active rows of o.q [m, k], int8 or float32; write the results of the others. `shape` is (m, n, k).

    found: what is called with (o, row, its place among the active rows) for each of them.
    """
    active.count[0] = 0
    for i in range(shape[0]):
        # A single row is multiplied without a search for zeros.
        if shape[0] > 1:
            bits = T.alloc_buffer((SCAN_LANES,), "uint32")
            if hasattr(o, "s"):
                or_int8(o.q, i, shape[2], bits)
            else:
                or_float32(o.q, i, shape[2], bits)
            if is_zero(bits):
                # No tile covers an inactive row, so its results are written here.
                for j in range(shape[1]):
                    o.y[i, j] = _of_zero_row(o, i, j)
            else:
                found(o, i, active.count[0])
                append_active(active, i)
        else:
            found(o, i, 0)
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
class Tiling:
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
