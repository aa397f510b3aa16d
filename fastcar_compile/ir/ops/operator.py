"""Registration of the operators in `fastcar::`: the eager definition, and why a graph has the operator."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._library.custom_ops import CustomOpDef
from torch.library import custom_op

from fastcar_compile.config.formats import KV_TYPES

_COND = "The MLP is skipped when every row replays: one branch computes, the other copies the cached output."
REASONS = {"cond": _COND}
"""Operator, without its overload -> what it is for. `cond` is PyTorch's own; the others register themselves."""


def operator(reason: str, fake: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return the decorator that registers a function as the eager definition of `fastcar::<its name>`.

    Args:
        reason: one sentence for the inspection page: what the operator is for.
        fake: gives results without values. Its parameters are those of the operator that they follow from, by name.
            None: the result has shape and type of the first argument.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        REASONS[f"fastcar.{function.__name__}"] = reason
        # No operator mutates: writes are functional, and a backend decides what happens in place.
        made = custom_op(f"fastcar::{function.__name__}", mutates_args=())(function)
        whole, read = inspect.signature(function), inspect.signature(fake).parameters if fake else ()

        @made.register_fake
        def _(*args: Any, **kwargs: Any) -> Any:
            given = whole.bind(*args, **kwargs).arguments
            first = next(iter(given.values()))
            return fake(*(given[name] for name in read)) if fake else first.new_empty(first.shape)

        return made

    return register


def operator_reasons(modules: Iterable[fx.GraphModule]) -> dict[str, str]:
    """Return the operators of graphs that have a reason -> that reason."""
    calls = (n for module in modules for n in module.graph.nodes if n.op == "call_function")
    names = {str(n.target).rpartition(".")[0] or getattr(n.target, "__name__", "") for n in calls}
    return {name: REASONS[name] for name in sorted(names & REASONS.keys())}


# Rows of the batch with positions of their own. A decode step has B rows of V videos: row b is one of video
# b // (B / V).


def sharing(batch: int, videos: int) -> int:
    """Return how many rows of a batch one video has.

    Raises:
        ValueError: the videos do not share the rows alike.
    """
    if batch % videos or batch < videos:
        raise ValueError(f"{batch} rows of {videos} videos")
    return batch // videos


def each_row(position: Tensor, rows: Sequence[Any], caches: Sequence[Tensor], call: Callable[..., Tensor]) -> Tensor:
    """Return call(*rows, *caches, position) where all rows share the position; else of each row by itself, joined.

    An inactive row, of position -1, is zero: kernels do not multiply rows of zeros.

    Args:
        position: int64 [1], or int64 [B].
        rows: [B, ...], of which the result has the shape of the first. caches: [V, ...].
    """
    batch = next(len(r) for r in rows if r is not None)
    if len(position) == 1 and batch == len(caches[0]):
        return call(*rows, *caches, position)
    share, own, made = sharing(batch, len(caches[0])), position.expand(batch), list[Tensor]()
    for b in range(batch):
        at, section = slice(b, b + 1), slice(b // share, b // share + 1)
        given = [None if r is None else r[at] for r in rows]
        found = own[b] >= 0
        made.append(call(*given, *(c[section] for c in caches), own[at]) if found else torch.zeros_like(rows[0][at]))
    return torch.cat(made)


# Rows of key and value caches: floats, or int8 with one exponent per block (MXINT8).


FLOAT16_MAX = 65504.0
"""A float16 cache limits magnitudes to this, infinities too."""

BLOCK, CACHE_BITS = KV_TYPES["int8"].block, 8
"""Elements of a row that share an exponent in an int8 cache, and the bits of one (OCP Microscaling Formats, MXINT8)."""

LEAST_EXPONENT = -120
"""Least exponent. No scale, inverse or product is subnormal then, so a CPU that flushes subnormals agrees."""

INT8_MAX = 127 * 2.0**121
"""An int8 cache limits magnitudes to this, infinities too: 64 * 2^122 would overflow when it is read."""

BIAS, MANTISSA_BITS = 127, 23
"""Exponent bias and mantissa bits of a float32."""

NOT_A_NUMBER = -128
"""Exponent of a block that contains a NaN; its mantissas are 0. As a scale its bits are those of minus infinity."""


def rounds_up(bits: int) -> int:
    """Return what carries into the exponent of a float32 that `bits` bits would round up to a power of two."""
    return 1 << (MANTISSA_BITS + 1 - bits)


def excess(bits: int) -> int:
    """Return a float32's exponent field minus the exponent of its block: a mantissa has bits - 1 before the point."""
    return BIAS + bits - 2


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values float32 [..., D] as cached rows, [..., `KvType.row_size(D)`].

    float16, bfloat16: rounded half to even; float16 is limited to ±65504, and a NaN stays a NaN. int8: D mantissas m
    from -127 to 127, then the exponents e of their blocks; the value is m * 2^e. e is the least exponent, from -120 on,
    for which every mantissa of the block rounds (half to even) to at most 127. Values are limited to ±127 * 2^121. A
    block that contains a NaN is all NaN. docs/reference/numerics.md defines the formats.
    """
    if dtype == torch.float16:
        value = value.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    return _rows(value) if dtype == torch.int8 else value.to(dtype)


def loaded(rows: Tensor, dim: int) -> Tensor:
    """Return the exact float32 values [..., dim] of cached rows; `dim` is a head's dimension."""
    # A float of 16 bits widens exactly, and float32 stays.
    if rows.dtype != torch.int8:
        return rows.to(torch.float32)
    # The last block may be cut: its scale is repeated 32 times, and the surplus is sliced off.
    scales = power_of_two(rows[..., dim:]).repeat_interleave(BLOCK, -1)
    return rows[..., :dim] * scales[..., :dim]


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, made of its bits."""
    return ((exponent.to(torch.int32) + BIAS) << MANTISSA_BITS).view(torch.float32)


def blocks(value: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return float32 [..., K] in blocks of 32 along the last axis, padded with zeros.

    A mantissa has `bits` bits with its sign. The exponent is the least one, from -120 on, with which no mantissa of the
    block rounds to 2^(bits - 1).

    Returns:
        mantissas, integers as float32 [..., n, 32], and exponents int32 [..., n]. A block with a NaN has zeros and
        -128.
    """
    padded = torch.nn.functional.pad(value.clamp(-INT8_MAX, INT8_MAX), (0, -value.shape[-1] % BLOCK))
    padded = padded.unflatten(-1, (-1, BLOCK))
    # torch's maximum of a block with a NaN is NaN, which is what `unknown` finds below.
    top = padded.abs().amax(-1)
    # Adding to the bits carries into the exponent exactly where the largest mantissa would round up to 2^(bits - 1).
    field = (top.view(torch.int32) + rounds_up(bits)) >> MANTISSA_BITS
    exponent = (field - excess(bits)).clamp(min=LEAST_EXPONENT)
    # The product with a power of two is exact, or so small that it rounds to 0 either way: `round` rounds once.
    mantissas = torch.round(padded * power_of_two(-exponent)[..., None])
    unknown = top.isnan()
    return torch.where(unknown[..., None], 0, mantissas), torch.where(unknown, NOT_A_NUMBER, exponent)


def _rows(value: Tensor) -> Tensor:
    mantissas, exponent = blocks(value, CACHE_BITS)
    return torch.cat([mantissas.flatten(-2)[..., : value.shape[-1]].to(torch.int8), exponent.to(torch.int8)], -1)
