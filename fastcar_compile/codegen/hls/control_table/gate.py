"""What a gate is decided on, and its memory words as a controller reads them (docs/reference/drs_table.md)."""

import numpy as np

from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD
from fastcar_compile.gates.base import Array, GateInputs, operand
from fastcar_compile.gates.learned import unit_exponents


def pack_inputs(inputs: GateInputs[Array]) -> tuple[Array, Array]:
    """Return the memory words of the operands `query` and `key`: q and the key of all rows, or x and the cached x."""
    query, key = (inputs.x, inputs.cached) if inputs.query is None else (inputs.query, inputs.key)
    return pack_rows(operand(query)), pack_rows(operand(key))


def pack_rows(rows: Array) -> Array:
    """Return float32 [B, heads, D] as memory words [B * heads * ceil(D / 4), 4], or [B, H] as [B * ceil(H / 4), 4].

    Each head begins a word, and so does each row; spare lanes are zero.
    """
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % FLOATS_PER_WORD)])
    return np.ascontiguousarray(padded, np.float32).reshape(-1, FLOATS_PER_WORD)


BFLOATS_PER_WORD = 8
"""bfloat16 values in a memory word of 128 bits."""


def pack_network(w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """Return a layer's network as memory words float32 [1 + units * (1 + 2 * ceil(H / 8)), 4] (fastcar_gate_core.hpp).

    The first word has the number of units. A unit is one word of b1, w2, the exponent of its lowest bit and b2, then
    its weights as bfloat16, eight to a word: those of x, then those of the change, each padded with zeros.

    Args:
        w1: float32 [units, 2 H] with the values of bfloat16. b1, w2: float32 [units]. b2: float32 [1].
    """
    units, width = w1.shape[0], w1.shape[1] // 2
    halves = np.pad(w1.reshape(units, 2, width), [(0, 0), (0, 0), (0, -width % BFLOATS_PER_WORD)])
    # A bfloat16 is the upper half of a float32: weights with values of bfloat16 lose nothing here.
    upper = (np.ascontiguousarray(halves, np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(units, -1)
    places = unit_exponents(w1).astype(np.int32)
    # b2 belongs to the layer, but every unit repeats it: a unit's head is then one whole memory word.
    head = np.stack([b1.view(np.int32), w2.view(np.int32), places, b2.view(np.int32).repeat(units)], 1)
    words = np.concatenate([head.view(np.uint32), upper.view(np.uint32)], 1)
    first = np.array([units, 0, 0, 0], np.uint32)
    return np.concatenate([first, words.reshape(-1)]).view(np.float32).reshape(-1, FLOATS_PER_WORD)


def unpack_network(words: Array, width: int) -> tuple[Array, Array, Array, Array]:
    """Return w1, b1, w2 and b2 of the words of `pack_network`; `width` is H."""
    bits = np.ascontiguousarray(words).view(np.uint32).reshape(-1)
    units, padded = int(bits[0]), width + -width % BFLOATS_PER_WORD
    each = bits[FLOATS_PER_WORD:].reshape(units, -1)
    upper = np.ascontiguousarray(each[:, FLOATS_PER_WORD:]).view(np.uint16).astype(np.uint32) << 16
    w1 = upper.view(np.float32).reshape(units, 2, padded)[:, :, :width].reshape(units, 2 * width)
    b1, w2, b2 = (np.ascontiguousarray(each[:, lane]).view(np.float32) for lane in (0, 1, 3))
    return w1, b1, w2, b2[:1]


def network_words(units: int, width: int) -> int:
    """Return the memory words of a network; none of no units."""
    return units and 1 + units * (1 + 2 * -(-width // BFLOATS_PER_WORD))
