"""The weight stream of one call: what the engine reads, byte for byte.

For every weight port a section of equal length, which starts at a multiple of 4 KiB: the tiles of the call's product, or
of gate/up and then down. An AXI port that carries several weight ports has their sections interleaved word by word. A tile is its scales, its biases if there are any (each padded to whole 16-byte words), then its rows of weights
(each padded to whole words, int4 to whole groups). What pads is zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fastcar_compile.artifact.engine import WORD_BYTES, DraftProducts, EngineProduct, section_words
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.config.formats import GROUP
from fastcar_compile.errors import UserError
from fastcar_compile.gates.base import Array
from fastcar_compile.support.machine import at_once

_BLOCK_BYTES = 1 << 19
"""Bytes of weights that are placed at once: they and what is made of them stay in a core's cache."""

_WORD = np.dtype(f"V{WORD_BYTES}")
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)


@dataclass(frozen=True)
class LinearWeights:
    """One linear of N outputs and K inputs.

    Args:
        values: int8 [N, K]; for w4a8 uint8 [N, 64 * G] as `pack_int4` packs them, G = ceil(K / 128), or the int8
            [N, 128 * G] of -8 .. 7 that it packs. Rows are read in blocks, so it may be a map of a file.
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
    gate_up = _Channels(first, design.gate_up, interleaved=True)
    parts = [(gate_up, design.gate_up), (_Channels([down], design.down), design.down)]
    return _stream(parts, design.axi_words)


def pack_linear(linears: Sequence[LinearWeights], product: EngineProduct, axi_words: int = 1) -> Array:
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
        what = f"the linears have {total} channels in all; the design expects {product.channels}"
        raise UserError(what, hint="pass the weights of the call that the design was chosen for")
    return _stream([(_Channels(linears, product), product)], axi_words)


def pack_draft(linears: Sequence[LinearWeights], products: DraftProducts, axi_words: int = 1) -> Array:
    """Return a draft's stream, uint8 [products.stream_bytes].

    Args:
        linears: gate and up, or up alone; inner; outer. axi_words: weight ports that an AXI port of the design carries.

    Raises:
        UserError: an array has another shape or dtype than the products.
    """
    *neurons, inner, outer = linears
    sizes = [*(("neurons", n, products.neurons, products.first) for n in neurons)]
    sizes += [
        ("inner", inner, products.rank, products.first),
        ("outer", outer, products.outer.channels, products.outer),
    ]
    for name, linear, channels, product in sizes:
        _check_linear(name, linear, channels, product)
    # Neurons take turns, as those of an MLP do, and all linear features are behind them.
    biases = [np.zeros(len(n.values), np.float32) if n.bias is None else n.bias for n in (*neurons, inner)]
    parts = [[n.values for n in (*neurons, inner)], [n.scales for n in (*neurons, inner)], biases]
    values, scales, bias = (_taking_turns(own[:-1], own[-1]) for own in parts)
    first = LinearWeights(values, scales, bias if products.first.bias else None)
    made = [(_Channels([one], product), product) for one, product in ((first, products.first), (outer, products.outer))]
    return _stream(made, axi_words)


def _taking_turns(arrays: Sequence[Array], last: Array) -> Array:
    """Return rows of arrays by turns, then those of the last one."""
    return np.concatenate([np.stack(arrays, 1).reshape(-1, *last.shape[1:]), last])


def _check_linear(name: str, linear: LinearWeights, channels: int, product: EngineProduct) -> None:
    """Raise UserError when an array of the linear `name` has another shape or dtype than the product."""
    groups = product.bits == 4
    packed = groups and linear.values.dtype == np.uint8
    inputs = GROUP * product.sums // (2 if packed else 1) if groups else product.inputs
    wanted = {
        "values": ((channels, inputs), np.dtype(np.uint8 if packed else np.int8), linear.values),
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


@dataclass(frozen=True)
class _Channels:
    """The channels of a product, which linears give one after another, or by turns (channel 2n gate n and 2n + 1 up n).

    A linear without a bias adds zeros where the product has biases.
    """

    linears: Sequence[LinearWeights]
    product: EngineProduct
    interleaved: bool = False

    def values(self, begin: int, end: int) -> Array:
        """Return rows of the weights; `begin` and `end` are multiples of the number of linears that take turns."""
        return self._rows([linear.values for linear in self.linears], begin, end)

    def factors(self, begin: int, end: int) -> list[Array]:
        """Return rows of the scales, and of the biases if there are any; little-endian."""
        found = [self._rows([linear.scales for linear in self.linears], begin, end)]
        if self.product.bias:
            biases = [np.zeros(len(n.values), np.float32) if n.bias is None else n.bias for n in self.linears]
            found.append(self._rows(biases, begin, end))
        return [rows.astype(rows.dtype.newbyteorder("<")) for rows in found]

    def _rows(self, arrays: Sequence[Array], begin: int, end: int) -> Array:
        """Return rows [begin, end), and zeros for those beyond the product's channels."""
        last = min(end, self.product.channels)
        if self.interleaved:
            turns = len(arrays)
            parts = [np.stack([a[begin // turns : last // turns] for a in arrays], 1).reshape(-1, *arrays[0].shape[1:])]
        else:
            ends = np.cumsum([len(a) for a in arrays])
            # The linears follow each other: `ends` are the channels at which each of them ends.
            starts = [(a, n - len(a)) for a, n in zip(arrays, ends, strict=True)]
            parts = [a[max(0, begin - at) : max(0, last - at)] for a, at in starts]
            parts = [part for part in parts if len(part)]
        if end > last:
            parts.append(np.zeros((end - last, *arrays[0].shape[1:]), arrays[0].dtype))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _stream(parts: Sequence[tuple[_Channels, EngineProduct]], axi_words: int) -> Array:
    """Return the sections of these products, one after another on each port, padded to 4 KiB.

    The sections of ports that share an AXI port are interleaved word by word.
    """
    words = section_words(sum(product.port_words for _, product in parts))
    stream, at = np.zeros((parts[0][1].ports // axi_words, words, axi_words), _WORD), 0
    for channels, product in parts:
        _place(channels, product, stream[:, at : at + product.port_words])
        at += product.port_words
    return stream.view(np.uint8).reshape(-1)


def _place(channels: _Channels, product: EngineProduct, stream: Array) -> None:
    """Put a product into its words of the AXI ports, [AXI ports, words, words of one]; blocks of whole tiles at once."""
    ports, _, shared = stream.shape
    # A row j of a tile is on every port, so a tile takes `tile * ports` channels.
    words, rows = product.head_words + product.tile_words, product.tile * product.ports
    step = max(1, _BLOCK_BYTES // (rows * product.channel_words * WORD_BYTES))

    def place(begin: int) -> None:
        end = min(begin + step, product.tiles)
        count = end - begin
        tiles = stream[:, begin * words : end * words].reshape(ports, count, words, shared)
        heads = [_by_tile(part, product) for part in channels.factors(begin * rows, end * rows)]
        head = np.concatenate(heads, axis=2).view(_WORD).reshape(ports, shared, count, -1)
        tiles[:, :, : product.head_words] = head.transpose(0, 2, 3, 1)
        body = tiles[:, :, product.head_words :].reshape(ports, count, product.tile, -1, shared)
        planes = list(_planes(channels.values(begin * rows, end * rows), product))
        for k, plane in enumerate(planes):
            by_port = plane.reshape(count, product.tile, ports, shared, -1)
            # Port p is word p % shared of AXI port p // shared.
            for i in range(shared):
                body[..., k :: len(planes), i] = by_port[:, :, :, i].transpose(2, 0, 1, 3)

    at_once(place, range(0, product.tiles, step))


def _planes(values: Array, product: EngineProduct) -> Iterator[Array]:
    """Yield words of the rows, [rows, words / n]: the k-th of n planes has words k, k + n, ...

    A word of int4 has 32 values of a row: byte i has value i (low) and 16 + i. So of the 64 bytes of a group as
    `pack_int4` packs it, the low halves of bytes 0 .. 31 make its first word, and the high halves its third.
    """
    if product.bits == 8:
        spare = product.channel_words * WORD_BYTES - values.shape[1]
        yield (np.pad(values, ((0, 0), (0, spare))) if spare else np.ascontiguousarray(values)).view(_WORD)
        return
    packed = values if values.dtype == np.uint8 else _packed(values)
    # Integers of 64 bits move the halves of eight bytes at once.
    eights = np.ascontiguousarray(packed).view(np.uint64).reshape(-1)
    for halves in (eights & _LOW, (eights >> np.uint64(4)) & _LOW):
        halves[:-2] |= halves[2:] << np.uint64(4)  # what follows 16 bytes on; every second word is used
        words = halves.view(_WORD).reshape(len(values), -1, 2, 2)
        yield words[:, :, 0, 0]
        yield words[:, :, 1, 0]


def _packed(values: Array) -> Array:
    """Return int8 [N, 128 * G] of -8 .. 7 as `pack_int4` does."""
    halves = values.view(np.uint8).reshape(len(values), -1, 2, GROUP // 2)
    return ((halves[:, :, 0] & 15) | (halves[:, :, 1] << 4)).reshape(len(values), -1)


def _by_tile(channels: Array, product: EngineProduct) -> Array:
    """Place channel (t * tile + j) * ports + p of [channels, ...] -> bytes [p, t, all j], padded to whole words."""
    tiles = channels.reshape(-1, product.tile, product.ports, channels[0].size).transpose(2, 0, 1, 3)
    data = np.ascontiguousarray(tiles).view(np.uint8).reshape(product.ports, len(tiles[0]), -1)
    return np.pad(data, ((0, 0), (0, 0), (0, -data.shape[2] % WORD_BYTES)))
