"""The weight stream of one call: what the engine reads, byte for byte.

For every weight port a section of equal length, which starts at a multiple of 4 KiB: the tiles of the call's product, or
of gate/up and then down. An AXI port that carries several weight ports has their sections interleaved word by word. A tile is its scales, its biases if there are any (each padded to whole 16-byte words), then its rows of weights
(each padded to whole words, int4 to whole groups). What pads is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.product import WORD_BYTES, Product, section_words
from fastcar_compile.errors import UserError
from fastcar_compile.formats import GROUP

Array = NDArray[Any]


@dataclass(frozen=True)
class LinearWeights:
    """One linear of N outputs and K inputs.

    Args:
        values: int8 [N, K]; for w4a8 int8 [N, 128 * G], of -8 .. 7, G = ceil(K / 128).
        scales: float32 [N]; for w4a8 float16 [N, G].
        bias: float32 [N], or None.
    """

    values: Array
    scales: Array
    bias: Array | None = None


def pack_mlp(linears: Sequence[LinearWeights], design: Design) -> Array:
    """Return one layer's MLP stream, uint8 [design.stream_bytes].

    Args:
        linears: gate, up, down of a gated MLP, or up, down of a plain one.

    Raises:
        UserError: an array has another shape or dtype than the design.
    """
    spec = design.mlp
    names = ("gate", "up", "down") if spec.gated else ("up", "down")
    if len(linears) != len(names):
        raise UserError(f"{len(linears)} linears were given; the design takes {', '.join(names)}")
    *first, down = linears
    for name, linear in zip(names, linears, strict=True):
        channels = spec.hidden if name == "down" else spec.intermediate
        _check_linear(name, linear, channels, design.down if name == "down" else design.gate_up)
    parts = [(_interleaved(first, design.gate_up), design.gate_up), (down, design.down)]
    return _stream(parts, design.axi_words)


def pack_linear(linears: Sequence[LinearWeights], product: Product, axi_words: int = 1) -> Array:
    """Return the stream of linears that share their input, uint8 [product.stream_bytes].

    Args:
        linears: their channels follow each other. All have a bias where `product.bias`, none otherwise.
        axi_words: weight ports that an AXI port of the design carries.

    Raises:
        UserError: an array has another shape or dtype than the product.
    """
    for i, linear in enumerate(linears):
        _check_linear(f"linear {i}", linear, len(linear.values), product)
        if product.bias and linear.bias is None:
            raise UserError(f"linear {i} has no bias; the design expects one", hint="call it apart from the others")
    total = sum(len(linear.values) for linear in linears)
    if total != product.channels:
        raise UserError(
            f"the linears have {total} channels in all; the design expects {product.channels}",
            hint="pass the weights of the call that the design was chosen for",
        )
    biases = [linear.bias for linear in linears if linear.bias is not None]
    joined = LinearWeights(
        np.concatenate([linear.values for linear in linears]),
        np.concatenate([linear.scales for linear in linears]),
        np.concatenate(biases) if product.bias else None,
    )
    return _stream([(joined, product)], axi_words)


def _stream(parts: Sequence[tuple[LinearWeights, Product]], axi_words: int) -> Array:
    """Return the sections of these products, one after another on each port, padded to 4 KiB.

    The sections of ports that share an AXI port are interleaved word by word.
    """
    joined = np.concatenate([_pack_product(linear, product) for linear, product in parts], axis=1)
    spare = WORD_BYTES * section_words(joined.shape[1] // WORD_BYTES) - joined.shape[1]
    words = np.pad(joined, ((0, 0), (0, spare))).reshape(len(joined) // axi_words, axi_words, -1, WORD_BYTES)
    return np.ascontiguousarray(words.transpose(0, 2, 1, 3)).reshape(-1)


def _check_linear(name: str, linear: LinearWeights, channels: int, product: Product) -> None:
    """Raise UserError when an array of the linear `name` has another shape or dtype than the product."""
    groups = product.bits == 4
    wanted = {
        "values": ((channels, GROUP * product.sums if groups else product.inputs), np.dtype(np.int8), linear.values),
        "scales": (
            (channels, product.sums) if groups else (channels,),
            np.dtype(np.float16 if groups else np.float32),
            linear.scales,
        ),
    }
    if linear.bias is not None:
        wanted["bias"] = ((channels,), np.dtype(np.float32), linear.bias)
        if not product.bias:
            raise UserError(f"{name} has a bias; the design expects none", hint="choose the design with the bias")
    for what, (shape, dtype, array) in wanted.items():
        if array.shape != shape or array.dtype != dtype:
            raise UserError(
                f"{name}.{what} is {array.dtype} {list(array.shape)}; the design expects {dtype} {list(shape)}",
                hint="pass the weights of the layer that the design was chosen for",
            )


def _interleaved(linears: Sequence[LinearWeights], product: Product) -> LinearWeights:
    """Make channel 2n gate n and 2n + 1 up n. A linear without a bias adds zeros where the other has one."""

    def merge(arrays: Sequence[Array]) -> Array:
        return np.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])

    biases = [np.zeros(len(n.values), np.float32) if n.bias is None else n.bias for n in linears]
    bias = merge(biases) if product.bias else None
    return LinearWeights(merge([n.values for n in linears]), merge([n.scales for n in linears]), bias)


def _pack_product(linear: LinearWeights, product: Product) -> Array:
    """Return uint8 [ports, bytes of the product on one port]."""
    parts = [_by_tile(linear.scales.astype(linear.scales.dtype.newbyteorder("<")), product)]
    if product.bias:
        bias = np.zeros(product.channels, np.float32) if linear.bias is None else linear.bias
        parts.append(_by_tile(bias.astype("<f4"), product))
    values = linear.values.reshape(product.channels, -1)
    rows = np.zeros((product.channels, product.channel_words * product.lanes), np.int8)
    rows[:, : values.shape[1]] = values
    if product.bits == 4:
        low, high = rows.reshape(product.channels, -1, 2, WORD_BYTES).transpose(2, 0, 1, 3)
        rows = ((low & 15) | (high << 4)).astype(np.int8).reshape(product.channels, -1)
    parts.append(_by_tile(rows, product))
    return np.concatenate(parts, axis=2).reshape(product.ports, -1)


def _by_tile(channels: Array, product: Product) -> Array:
    """Place channel (t * tile + j) * ports + p of [channels, ...] -> bytes [p, t, all j], padded to whole words."""
    padded = np.zeros((product.tiles * product.tile * product.ports, *channels.shape[1:]), channels.dtype)
    padded[: product.channels] = channels
    tiles = padded.reshape(product.tiles, product.tile, product.ports, -1).transpose(2, 0, 1, 3)
    data = np.ascontiguousarray(tiles).view(np.uint8).reshape(product.ports, product.tiles, -1)
    return np.pad(data, ((0, 0), (0, 0), (0, -data.shape[2] % WORD_BYTES)))
