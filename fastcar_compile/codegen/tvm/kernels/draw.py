"""Draws of tokens, bit for bit as runtime/sampling.py and ir/draws.py define them."""

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import script
from fastcar_compile.codegen.tvm.kernels.script import inlined
from fastcar_compile.codegen.tvm.kernels.vectors import Expr, fence, magnitude_bits
from fastcar_compile.ir.draws import DRAW_NUMBERS, KNOTS, LOG2_E, MULTIPLIERS, ROUNDS, WEYL

_INFINITY = 0x7F800000


def _word(number: Expr) -> Expr:
    return T.Cast("uint32", number)


@inlined
def _philox(low, high, word, product):
    """Put the four words of Philox4x32-10 into the place of their counter. low, high: halves of the key."""
    for i in T.unroll(ROUNDS):
        product[0] = T.Cast("uint64", word[0]) * T.uint64(MULTIPLIERS[0])
        product[1] = T.Cast("uint64", word[2]) * T.uint64(MULTIPLIERS[1])
        word[0] = _word(product[1] >> T.uint64(32)) ^ word[1] ^ (_word(low) + _word(i) * T.uint32(WEYL[0]))
        word[1] = _word(product[1])
        word[2] = _word(product[0] >> T.uint64(32)) ^ word[3] ^ (_word(high) + _word(i) * T.uint32(WEYL[1]))
        word[3] = _word(product[0])


@inlined
def _least_kept(logits, r, part, kept, bits, count):
    """Put the bits of the kept-th largest float32 of a part of a row into bits[0], found from the sign to the last."""
    bits[0] = T.int32(-(2**31))  # in an order in which integers compare as floats do
    for i in range(32):
        bits[1] = T.Select(i == 0, T.int32(0), bits[0] + T.shift_left(T.int32(1), 31 - i))
        bits[2] = T.Select(bits[1] < 0, bits[1] ^ T.int32(0x7FFFFFFF), bits[1])
        count[0] = 0
        for c in range(part[1]):  # what comes before -inf is a NaN, and nothing is less than that
            count[0] += T.Select(logits[r, 0, part[0] + c] < T.reinterpret("float32", bits[2]), T.int32(0), T.int32(1))
        if T.Cast("int64", count[0]) >= kept:
            bits[0] = bits[1]
    bits[0] = T.Select(bits[0] < 0, bits[0] ^ T.int32(0x7FFFFFFF), bits[0])


@inlined
def _largest(logits, r, part, numbers, temperature, knots, bits, word, product, most, tokens):
    """Put the token of the largest sum of score and noise, among logits of at least bits[0], into the row's place."""
    most[0] = -T.infinity("float64")
    bits[3] = -1  # the four tokens that have the words
    for c in range(part[1]):
        if logits[r, 0, part[0] + c] >= T.reinterpret("float32", bits[0]):
            if bits[3] != c // 4:
                bits[3] = c // 4
                word[0] = _word(c // 4)
                word[1] = _word(numbers[2] + T.Cast("int64", r) % numbers[1])
                word[2] = _word(T.Cast("int64", r) // numbers[1])
                word[3] = _word(numbers[3])
                _philox(numbers[4], numbers[5], word, product)
            bits[1] = T.reinterpret("int32", T.Cast("float32", word[c % 4] | T.uint32(1)))
            bits[2] = (bits[1] >> 12) - T.int32(127 << 11)
            step = T.Cast("int64", knots[bits[2] + 1] - knots[bits[2]])
            noise = T.Cast("int64", knots[bits[2]]) * T.int64(4096) + step * T.Cast("int64", bits[1] & 4095)
            score = T.Cast("float64", logits[r, 0, part[0] + c]) / temperature[0] * T.float64(LOG2_E)
            most[1] = fence("float64", score) + T.Cast("float64", noise) * T.float64(2.0**-32)
            if most[1] > most[0]:
                most[0] = most[1]
                tokens[r] = T.Cast("int64", c)


@script.kernel
def draw(rows: int, vocabulary: int) -> PrimFunc:
    """Return int64 [rows]: what each row draws among a part of its logits float32 [rows, 1, V], counted from there.

    A row has -1 where one of these is a NaN or infinite, or all are minus infinity. numbers int64: see DRAW_NUMBERS.
    temperature float64 [1]: from 1e-30 to 1e30. knots int32: `ir.draws.table`.
    """

    @script.prim_func(private=True, s_tir=True)
    def draw_tokens(
        logits: T.Buffer((rows, 1, vocabulary), "float32"),
        numbers: T.Buffer((len(DRAW_NUMBERS),), "int64"),
        temperature: T.Buffer((1,), "float64"),
        knots: T.Buffer((KNOTS,), "int32"),
        tokens: T.Buffer((rows,), "int64"),
    ):
        for r in range(rows):
            with T.sblock("row"):
                script.access([logits, numbers, temperature, knots], [tokens])
                part = T.alloc_buffer((2,), "int32")
                count = T.alloc_buffer((2,), "int32")
                bits = T.alloc_buffer((4,), "int32")
                word = T.alloc_buffer((4,), "uint32")
                product = T.alloc_buffer((2,), "uint64")
                most = T.alloc_buffer((2,), "float64")
                tokens[r] = T.int64(-1)
                if T.Cast("int64", r) < numbers[0]:
                    part[0] = T.Cast("int32", numbers[7])
                    part[1] = T.Cast("int32", numbers[8])
                    count[0] = 0
                    count[1] = 0
                    for c in range(part[1]):
                        magnitude = magnitude_bits(logits[r, 0, part[0] + c], 1)
                        count[0] += T.Select(magnitude < _INFINITY, T.int32(1), T.int32(0))
                        least = logits[r, 0, part[0] + c] == -T.infinity("float32")
                        count[1] += T.Select(least, T.int32(1), T.int32(0))
                    if count[0] > 0 and count[0] + count[1] == part[1]:
                        bits[0] = T.int32(_INFINITY - 2**31)
                        if numbers[6] > 0 and numbers[6] < numbers[8]:
                            _least_kept(logits, r, part, numbers[6], bits, count)
                        _largest(logits, r, part, numbers, temperature, knots, bits, word, product, most, tokens)

    return draw_tokens
