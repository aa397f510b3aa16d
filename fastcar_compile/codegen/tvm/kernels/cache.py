"""Elements of cached rows as float32, whatever type the cache has. ir/ops/operator.py defines them bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from tvm import te, topi
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE, HeadShape, script, vectors
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, broadcast, intrinsic, magnitude_bits, ramp, vector
from fastcar_compile.config.formats import kv_type
from fastcar_compile.ir.ops import operator as cached
from fastcar_compile.ir.ops.operator import BIAS, MANTISSA_BITS

Row = Callable[[Expr], Expr]
"""Row of a buffer: index along the last axis -> element."""


def number_of(numbers: Any, row: Expr) -> Expr:
    """Return the number of a row of the batch: its own, or the one that all rows share."""
    return numbers[row if int(numbers.shape[0]) > 1 else 0]


def row_at(rows: Any, *index: Expr) -> Row:
    """Return the row of a buffer at an index."""
    return lambda c: rows[(*index, c)]


def power_of_two(exponent: Expr, lanes: int = 1) -> Expr:
    """Return 2^exponent of int32, by its bits. -128 (NaN) gives minus infinity, whose product with 0 is a NaN."""
    biased = exponent + broadcast(T.int32(BIAS), lanes)
    return T.reinterpret(
        vectors.vector_type("float32", lanes), T.shift_left(biased, broadcast(T.int32(MANTISSA_BITS), lanes))
    )


@dataclass(frozen=True)
class RowFormat:
    """How a kernel for `isa` reads rows of heads of `dim` elements from a cache of `dtype`.

    An element is at start + offset. A vector's lane is in `offset`, and start and start + offset are in one block of
    the exponents, so that the lanes share one exponent.
    """

    dim: int
    dtype: str
    isa: InstructionSet

    @property
    def size(self) -> int:
        """Elements of a cached row, exponents included."""
        return kv_type(self.dtype).row_size(self.dim)

    @property
    def bytes(self) -> int:
        """Bytes of a cached row."""
        return kv_type(self.dtype).row_bytes(self.dim)

    def elements_of(self, size: int) -> int:
        """Return how many elements `size` bytes hold."""
        return size * 8 // kv_type(self.dtype).bits

    def vectors_of_block(self, lanes: int) -> int:
        """Return the vectors of a row that share an exponent, 1 where rows have none or end within a block."""
        block = kv_type(self.dtype).block
        return max(1, block // lanes) if block and self.dim % block == 0 else 1

    def element(self, row: Row, start: Expr, offset: Expr) -> Expr:
        """Return an element as float32."""
        value = row(start + offset)
        if not kv_type(self.dtype).block:
            return vectors.to_float32(value, self.dtype, self.isa)
        return T.Cast("float32", value) * self._scale(row, start)

    def weighted(self, weight: Expr, row: Row, start: Expr, offset: Expr) -> Expr:
        """Return weight * element. The exponent meets the weight, once for all lanes."""
        if not kv_type(self.dtype).block:
            return weight * self.element(row, start, offset)
        scale = self._scale(row, start)
        return T.Cast("float32", row(start + offset)) * (weight * scale)

    def product(self, query: Row, row: Row, start: Expr, offset: Expr, lanes: int) -> Expr:
        """Return lane `offset` of query * row, summed over the `vectors_of_block` vectors from `start` on."""
        count = self.vectors_of_block(lanes)
        if count == 1:
            return query(start + offset) * self.element(row, start, offset)
        # All vectors of the block share an exponent: their products are summed first and scaled once.
        first, *rest = [start + i * lanes + offset for i in range(count)]
        total = query(first) * T.Cast("float32", row(first))
        for at in rest:
            total = total + query(at) * T.Cast("float32", row(at))
        return total * self._scale(row, start)

    def _scale(self, row: Row, start: Expr) -> Expr:
        return power_of_two(T.Cast("int32", row(self.dim + start // kv_type(self.dtype).block)))


# The append to a key/value cache: rows rounded to the KV type, bit for bit as ir/ops/operator.py defines it.


_INFINITY = 0xFF << 23
"""Bits of a float32."""

PARALLEL_VALUES = 1 << 15
"""Values from which a second thread pays for launching and awaiting a parallel region."""

_LARGEST = (254 << 23) | (0x7E << 16)
"""Bits of `cached.INT8_MAX`."""


@script.kernel
def cache_write(
    cache: HeadShape,
    rows: int,
    dtype: str = "float32",
    batch: tuple[int, int] | None = None,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Write value float32 [B, H, rows, D] to cache [V, H, S, D] of `dtype` from row `position` on, in place.

    Rows beyond S are dropped, and those of an inactive row of the batch, whose position is -1. `batch`: B and the
    number of positions; None: B = V, and one position.
    """
    return _append(cache, rows, lambda position: position, dtype, batch or (cache[0], 1), isa)


@script.kernel
def ring_write(
    cache: HeadShape,
    rows: int,
    sinks: int,
    dtype: str = "float32",
    batch: tuple[int, int] | None = None,
    isa: InstructionSet = PORTABLE,
) -> PrimFunc:
    """Write value float32 [B, H, rows, D] to the ring cache [V, H, sinks + R, D] from `position` on, in place."""

    def row_of(position: Expr) -> Expr:
        # Sinks keep their rows. A later position wraps around the ring behind them.
        return T.if_then_else(position < sinks, position, sinks + (position - sinks) % (cache[2] - sinks))

    return _append(cache, rows, row_of, dtype, batch or (cache[0], 1), isa)


def _append(
    cache: HeadShape,
    rows: int,
    row_of: Callable[[Expr], Expr],
    dtype: str,
    batch: tuple[int, int],
    isa: InstructionSet,
) -> PrimFunc:
    """Return the kernel. `row_of` gives the cache's row of a position."""
    (videos, h, s, d), width, (b, positions) = cache, kv_type(dtype).row_size(cache[3]), batch
    share, alone = b // videos, positions == 1
    # Parallel over the heads of all rows of the batch where a second thread pays.
    loop = T.parallel if b * h > 1 and b * h * rows * d >= PARALLEL_VALUES else T.serial
    write_row = partial(_write_elements, d, dtype, isa)
    if dtype == "int8":
        write_row = partial(_write_blocks, d, vectors.vector_lanes(d))

    @script.prim_func(private=True, s_tir=True)
    def append(
        keys: T.Buffer((videos, h, s, width), dtype),
        value: T.Buffer((b, h, rows, d), "float32"),
        position: T.Buffer((positions,), "int64"),
    ):
        # head: batch rows times key/value heads. r: appended rows.
        for head in loop(b * h):
            for r in range(rows):
                with T.sblock("row"):
                    script.access([value, position], [keys])
                    i: T.let = head // h
                    j: T.let = head % h
                    p: T.let = T.Cast("int32", number_of(position, i)) + r
                    at: T.let = row_of(p)
                    # A chunk may reach past the cache. Row S would be row 0 of the next head.
                    if at < s and (alone or p >= 0):
                        write_row(keys, (i // share, j, at), value, (i, j, r))

    return append


@script.inlined
def _write_elements(d, dtype, isa, keys, target, value, source):
    """Write row `source` of value to row `target` of keys: d elements, vectorised."""
    for c in T.vectorized(d):
        keys[(*target, c)] = vectors.from_float32(value[(*source, c)], dtype, isa)


@script.inlined
def _largest_magnitude(size, lanes, value, source, e, top):
    # c: vectors of the block, whose magnitudes compare as integers. v: one vector.
    for v in T.vectorized(lanes):
        top[v] = 0
    for c in range(size // lanes):
        for v in T.vectorized(lanes):
            top[v] = T.max(top[v], magnitude_bits(value[(*source, e * cached.BLOCK + c * lanes + v)], 1))
    # The intrinsic takes a vector. A single lane is the maximum already.
    if lanes > 1:
        top[0] = intrinsic("int32", f"llvm.vector.reduce.smax.v{lanes}i32", top[vector(0, lanes)])


@script.inlined
def _write_mantissas(size, lanes, keys, target, value, source, e, inverse):
    # c: vectors of the block. nearbyint rounds half to even, and a ramp keeps it a vector instruction.
    # The inverse is a power of two, so its product is exact and only nearbyint rounds.
    for c in range(size // lanes):
        at = T.meta_var(ramp(e * cached.BLOCK + c * lanes, lanes))
        keys[(*target, at)] = vectors.cast("int8", T.nearbyint(bounded(value[(*source, at)]) * inverse[0]), lanes)


@script.inlined
def _write_blocks(d, lanes, keys, target, value, source):
    """Write the row as int8: per block the exponent from its largest magnitude's bits, then the mantissas."""
    top = T.alloc_buffer((lanes,), "int32")
    exponent = T.alloc_buffer((1,), "int32")
    inverse = T.alloc_buffer((1,), "float32")
    # e: blocks of 32 elements. The last one is shorter where 32 does not divide D.
    for e in range(-(-d // cached.BLOCK)):
        size = T.meta_var(T.min(cached.BLOCK, d - e * cached.BLOCK))
        _largest_magnitude(size, lanes, value, source, e, top)
        # The exponent is that of limited magnitudes, because the mantissas are made from limited values.
        exponent[0] = T.max(exponent_of(T.min(top[0], _LARGEST), cached.CACHE_BITS), cached.LEAST_EXPONENT)
        # Above infinity only NaN is left. Its block has mantissas of 0 and the exponent NOT_A_NUMBER.
        inverse[0] = T.Select(top[0] > _INFINITY, T.float32(0), power_of_two(-exponent[0]))
        # Exponents stand behind all D mantissas, so mantissas are whole vectors.
        keys[(*target, d + e)] = T.Cast("int8", T.Select(top[0] > _INFINITY, cached.NOT_A_NUMBER, exponent[0]))
        _write_mantissas(size, lanes, keys, target, value, source, e, inverse)


def exponent_of(bits: Expr, mantissa_bits: int, lanes: int = 1) -> Expr:
    """Return the exponent of the least scale with which a float32 of these bits rounds to a mantissa of so many."""
    # The addition carries into the exponent field just where a mantissa would round up past its largest value.
    carried = bits + broadcast(T.int32(cached.rounds_up(mantissa_bits)), lanes)
    field = T.shift_right(carried, broadcast(T.int32(MANTISSA_BITS), lanes))
    return field - broadcast(T.int32(cached.excess(mantissa_bits)), lanes)


def bounded(value: Expr, lanes: int = 1) -> Expr:
    """Return the value within what an int8 cache keeps. T.min gives its second operand where the first is a NaN."""
    least, most = (broadcast(T.float32(limit), lanes) for limit in (-cached.INT8_MAX, cached.INT8_MAX))
    return T.max(T.min(value, most), least)


# Vectors, one per layer, concatenated and split a few at a time: a kernel of many arguments compiles slowly.


MAX_ROWS = 8
"""Vectors that one kernel concatenates or splits."""


@cache
def concat_rows(sizes: tuple[int, ...], dtype: str) -> PrimFunc:
    """Return the concatenation of vectors of these sizes."""
    rows = [te.placeholder((size,), dtype, f"row_{i}") for i, size in enumerate(sizes)]
    return _opaque([*rows, topi.concatenate(rows, 0)], "concat_rows")


@cache
def split_rows(count: int, size: int, dtype: str) -> PrimFunc:
    """Return a vector of count * size elements as `count` vectors."""
    whole = te.placeholder((count * size,), dtype, "whole")
    return _opaque([whole, *topi.split(whole, count, 0)], "split_rows")


def _opaque(tensors: list[Any], name: str) -> PrimFunc:
    # Without the mark TVM would fuse several of them into one.
    kernel: Any = te.create_prim_func(tensors).without_attr("global_symbol").with_attr({"op_pattern": OPAQUE})
    kernel.__name__ = name
    return kernel


# Reads and in-place writes of a frame slot: MLP caches float32 [F, B, H] and chain counters int32 [F, B].
#
# The slot of a forward is step mod F. V videos have B rows, and row b is one of video b // (B / V). Rows share one
# step, or each has its own; below 0 it keeps nothing.


def _element(row: tuple[int, ...], at: Any) -> tuple[Expr, ...]:
    """Return the index of an element of a row [B] or [B, H], as T.grid gives it: one variable, or a list of them."""
    return (at,) if len(row) == 1 else tuple(at)


def slot_of(slots: int, share: int, step: Any, at: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Return the index of the element `at` of a row [B] or [B, H] in a cache [F, V] or [F, V, H]."""
    # A step of -1 has a slot too: what is read there is not used.
    return (T.truncmod(T.Cast("int32", number_of(step, at[0])) + slots, slots), at[0] // share, *at[1:])


@script.kernel
def slot_read(shape: tuple[int, ...], dtype: str, steps: int = 1) -> PrimFunc:
    """Return the slot of `step` of a cache [F, V, H], or of counters [F, V]: [B, H], or [B]."""
    slots, rows = shape[0], max(steps, shape[1])
    row, share = (rows, *shape[2:]), rows // shape[1]
    element = partial(_element, row)

    @script.prim_func(private=True, s_tir=True)
    def read_slot(cache: T.Buffer(shape, dtype), step: T.Buffer((steps,), "int64"), y: T.Buffer(row, dtype)):
        # With one step one contiguous copy of B * H elements, because the slot is the outermost axis.
        for at in T.grid(*row):
            with T.sblock("copy"):
                script.access([cache, step], [y])
                y[element(at)] = cache[slot_of(slots, share, step, element(at))]

    return read_slot


@script.kernel
def slot_write(shape: tuple[int, ...], dtype: str, steps: int = 1) -> PrimFunc:
    """Write value [B, H], or [B], to the slot of `step` of a cache [F, V, H], or of counters [F, V], in place."""
    slots, rows, alone = shape[0], max(steps, shape[1]), steps == 1
    row, share = (rows, *shape[2:]), rows // shape[1]
    element = partial(_element, row)

    @script.prim_func(private=True, s_tir=True)
    def write_slot(cache: T.Buffer(shape, dtype), value: T.Buffer(row, dtype), step: T.Buffer((steps,), "int64")):
        for at in T.grid(*row):
            with T.sblock("copy"):
                script.access([value, step], [cache])
                if alone or number_of(step, element(at)[0]) >= 0:
                    cache[slot_of(slots, share, step, element(at))] = value[element(at)]

    return write_slot


@script.kernel
def slots_write(shape: tuple[int, ...], steps: int = 1) -> PrimFunc:
    """Write the rows of y float32 [B, H] that do not replay to the slot of `step` of a cache float32 [F, V, H], in
    place, and those of x to that of another one: `keep_frame`.
    """
    (slots, videos, width), alone = shape, steps == 1
    rows = max(steps, videos)
    share = rows // videos

    @script.prim_func(private=True, s_tir=True)
    def write_slots(
        cache: T.Buffer((slots, videos, width), "float32"),
        inputs: T.Buffer((slots, videos, width), "float32"),
        y: T.Buffer((rows, width), "float32"),
        x: T.Buffer((rows, width), "float32"),
        replay: T.Buffer((rows,), "bool"),
        step: T.Buffer((steps,), "int64"),
    ):
        # i: rows of the batch. A row that replays keeps the slot: input and output of the forward that it replays.
        for i in range(rows):
            if (alone or number_of(step, i) >= 0) and not replay[i]:
                for c in range(width):
                    with T.sblock("outputs"):
                        script.access([y, step], [cache])
                        cache[slot_of(slots, share, step, (i, c))] = y[i, c]
                for c in range(width):
                    with T.sblock("inputs"):
                        script.access([x, step], [inputs])
                        inputs[slot_of(slots, share, step, (i, c))] = x[i, c]

    return write_slots
