"""Weights that are no numbers are refused, and weights that a number format loses are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from fastcar_compile.config.formats import GROUP
from fastcar_compile.errors import LISTED, CompileError
from fastcar_compile.ir.ops.linear import LARGEST_GROUP_SCALE, SMALLEST_GROUP_SCALE, unpack_int4
from fastcar_compile.ir.query import is_op
from fastcar_compile.support.values import warn

if TYPE_CHECKING:
    from fastcar_compile.ir.program import DecoderProgram

aten = torch.ops.aten

_HINT = "give the weights of a checkpoint that is whole; a mask of infinities may only be added to logits"


def require_numbers(program: DecoderProgram) -> None:
    """Raise CompileError with every parameter in memory that holds a NaN or an infinity; others are checked when read.

    Infinities are allowed where they can only forbid something: see `_is_mask`.
    """
    readers: dict[str, list[fx.Node]] = {}
    for module in program.all_graphs():
        for node in module.graph.find_nodes(op="get_attr"):
            readers.setdefault(str(node.target), []).append(node)
    masks = {name for name, nodes in readers.items() if all(map(_is_mask, nodes))}
    if program.lazy is not None:
        program.lazy.masks = frozenset(masks)
    params, problems = program.params, list[CompileError]()
    for name in params:
        if not params.spec(name).is_meta:
            try:
                require_finite(name, params[name], is_mask=name in masks)
            except CompileError as error:
                problems.append(error)
    CompileError.raise_all(problems)


def require_finite(name: str, value: Tensor, *, is_mask: bool, row: int = 0) -> None:
    """Raise CompileError where a tensor holds a NaN or an infinity.

    Args:
        is_mask: infinities are allowed. row: of the whole tensor, at which `value` begins.
    """
    if not value.is_floating_point() or not value.numel():
        return
    # One pass and no temporary tensor: a NaN is both the least and the largest value.
    least, largest = value.aminmax()
    if least.isnan() or (not is_mask and (least.isinf() or largest.isinf())):
        wrong = value.isnan() if is_mask else ~value.isfinite()
        at = wrong.nonzero()[0].tolist()
        place = [at[0] + row, *at[1:]] if at else []
        raise CompileError(f"{name} holds {value[tuple(at)].item()} at {place}", where=name, hint=_HINT)


_PASSED_ON = (
    *(aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.select, aten.permute),
    *(
        aten.transpose,
        aten.index,
        aten.index_select,
        aten.embedding,
        aten.clone,
        aten.alias,
        aten.detach,
        aten._to_copy,
    ),
    *(aten.to, aten.lift_fresh_copy, aten.add, aten.add_, aten.sub, aten.where, aten.masked_fill, aten.masked_fill_),
    *(aten.minimum, aten.maximum),
)
"""Operators that leave an infinity where it is, or beside one value of it."""

_COMPARISONS = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)


def _is_mask(node: fx.Node) -> bool:
    """Return whether every use of a value ends as what is added to logits or to scores, or in a comparison."""
    found, stack = {node}, [node]
    while stack:
        current = stack.pop()
        for user in current.users:
            bias = is_op(user, aten.linear) and current not in user.args[:2]
            mask = is_op(user, aten.scaled_dot_product_attention) and current not in user.args[:3]
            if mask or user.op == "output" or is_op(user, aten.softmax, aten.log_softmax, *_COMPARISONS):
                continue
            if not bias and not is_op(user, *_PASSED_ON):
                return False
            if user not in found:
                found.add(user)
                stack.append(user)
    return True


def lost(name: str, weight: Tensor, made: Sequence[Tensor]) -> int:
    """Return how many weights that are not 0 their number format has no number for, so that they are 0, or nearly.

    What rounding within the format's range makes 0 is not counted.

    Args:
        weight: float32 [N, K]. made: what the format stores instead.

    Raises:
        CompileError: the format's range ends below a weight.
    """
    stored, *scales = made
    if weight.is_meta or not weight.numel() or stored.dtype not in _FORMATS:
        return 0
    _require_range(name, weight, stored.dtype)
    if not scales:
        return int(weight.count_nonzero() - stored.count_nonzero())
    if stored.dtype == torch.int8:
        # A scale that is no normal float32, or was 0, of which `quantize_weight` makes 1.
        least = torch.finfo(torch.float32).tiny
        rows = weight[(scales[0] < least) | (scales[0] == 1)]
        return int(rows[(rows.abs() < 127 * least).all(1)].count_nonzero())
    coarse = scales[0] == SMALLEST_GROUP_SCALE
    rows = coarse.any(1)
    if not rows.any():
        return 0
    groups = coarse[rows].repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    zero = unpack_int4(stored[rows])[:, : weight.shape[1]] == 0
    return int((groups & zero & (weight[rows] != 0)).sum())


_FORMATS = {
    torch.float16: ("fp16", "float16", 65504.0, "no magnitudes below 6e-08", "bf16"),
    torch.bfloat16: ("bf16", "bfloat16", torch.finfo(torch.bfloat16).max, "no magnitudes below 9e-41", "none"),
    torch.int8: ("w8a8", "int8", torch.inf, "no scale for rows below 1.5e-36", "none"),
    torch.uint8: ("w4a8", "int4", 7 * LARGEST_GROUP_SCALE, "no scale for groups of 128 below 3e-05", "w8a8"),
}
"""Stored dtype -> quant, its name in texts, the largest magnitude, what it lacks, and a quant that does not lack it."""


def _require_range(name: str, weight: Tensor, dtype: torch.dtype) -> None:
    quant, text, most, _, other = _FORMATS[dtype]
    largest = weight.aminmax()
    top = max(-largest.min, largest.max)
    if top > most and (dtype == torch.uint8 or top.to(dtype).isinf()):
        what = f"{name} has a weight of magnitude {top.item():g}, and {text} ends at {most:g}"
        raise CompileError(what, where=f"quant={quant!r}", hint=f'choose quant "{other}", whose range is larger')


LEAST_SHARE = 1e-4
"""Share of a weight from which its loss is told: of normally distributed weights a few are near 0 in any format."""


def warn_of_losses(quant: str, shares: Mapping[str, float]) -> None:
    """Warn of weights of which a number format loses a share.

    Args:
        shares: name of the weight -> share of its values.
    """
    names = [f"{name} ({share:.2%})" for name, share in shares.items() if share >= LEAST_SHARE]
    if not names:
        return
    text, lacks, other = next((f[1], f[3], f[4]) for f in _FORMATS.values() if f[0] == quant)
    listed = ", ".join(names[:LISTED]) + f" and {len(names) - LISTED} more" * (len(names) > LISTED)
    warn(f'quant "{quant}" loses weights, because {text} has {lacks}: {listed}. Choose quant "{other}"', 4)
