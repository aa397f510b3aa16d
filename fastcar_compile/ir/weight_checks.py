"""Weights that are no numbers are refused, and weights that a number format loses are counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from fastcar_compile.config.formats import GROUP
from fastcar_compile.errors import LISTED, CompileError, attempt
from fastcar_compile.ir.ops.linear import SMALLEST_GROUP_SCALE
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import is_op
from fastcar_compile.support.values import warn

if TYPE_CHECKING:
    from fastcar_compile.ir.program import DecoderProgram

aten = torch.ops.aten


def require_numbers(program: DecoderProgram) -> None:
    """Raise CompileError with every parameter in memory that holds a NaN or an infinity; others are checked when read.

    Infinities are allowed where they can only forbid something: see `_is_mask`.
    """
    numbers = {
        str(n.target) for m in program.all_graphs() for n in m.graph.find_nodes(op="get_attr") if not _is_mask(n)
    }
    params, problems = program.params, list[CompileError]()
    masks = params.keys() - numbers
    if program.lazy is not None:
        program.lazy.masks = masks
    for name in (name for name in params if not params.spec(name).is_meta):
        attempt(problems, partial(require_finite, name, params[name], is_mask=name in masks))
    for node in (node for module in program.all_graphs() for node in module.graph.nodes):
        if any(isinstance(value, float) and math.isnan(value) for value in (*node.args, *node.kwargs.values())):
            hint = "correct the number of the model that it reads, such as an epsilon or a scale"
            problems.append(error_at(node, f"{node.name} reads a constant that is no number (NaN)", hint))
    CompileError.raise_all(problems)


def require_finite(name: str, value: Tensor, *, is_mask: bool) -> None:
    """Raise CompileError where a tensor holds a NaN or, unless it is a mask, an infinity."""
    if not value.is_floating_point() or not value.numel():
        return
    # One pass and no temporary tensor: a NaN is both the least and the largest value.
    least, largest = value.aminmax()
    if least.isnan() or (not is_mask and (least.isinf() or largest.isinf())):
        what = f"{name} holds {'values that are no numbers (NaN)' if least.isnan() else 'infinite values'}"
        hint = "give the weights of a whole checkpoint; a mask of infinities may only be added to logits or scores"
        raise CompileError(what, where=name, hint=hint)


_PASSED_ON = (
    *(aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.select, aten.permute),
    *(aten.transpose, aten.index, aten.index_select, aten.embedding, aten.clone, aten.alias, aten.detach, aten.to),
    *(aten._to_copy, aten.lift_fresh_copy, aten.add, aten.add_, aten.sub, aten.where, aten.masked_fill),
    *(aten.masked_fill_, aten.minimum, aten.maximum),
)
"""Operators that leave an infinity where it is."""


def _is_mask(node: fx.Node) -> bool:
    """Return whether every use of a value ends as what is added to logits or to scores."""
    return all(
        user.op == "output"
        or is_op(user, aten.softmax, aten.log_softmax)
        or ((is_op(user, *_PASSED_ON) or (is_op(user, aten.linear) and node not in user.args[:2])) and _is_mask(user))
        for user in node.users
    )


_FORMATS = {
    torch.float16: ("fp16", "bf16", 65520.0, "float16 ends at 65504", "float16 has no magnitude below 6e-08"),
    torch.bfloat16: ("bf16", "none", 3.3962e38, "bfloat16 ends at 3.39e38", "bfloat16 has no magnitude below 9e-41"),
    torch.int8: ("w8a8", "none", torch.inf, "", "int8 has no scale for rows below 1.5e-36"),
    torch.uint8: ("w4a8", "w8a8", 491280.0, "int4 ends at 458528", "int4 has no scale for groups of 128 below 3e-05"),
}
"""Stored dtype -> quant, a quant of larger range, the least magnitude beyond the range, and the two ends as texts."""


def lost(name: str, weight: Tensor, made: Sequence[Tensor]) -> int:
    """Return how many weights that are not 0 become 0 because the range of their number format ends above them.

    What rounding within the range makes 0 is not counted.

    Args:
        weight: float32 [N, K]. made: what the format stores instead.

    Raises:
        CompileError: the range ends below a weight.
    """
    stored, *scales = made
    if weight.is_meta or not weight.numel() or stored.dtype not in _FORMATS:
        return 0
    quant, other, beyond, end, _ = _FORMATS[stored.dtype]
    top = max(-weight.min(), weight.max())
    if top >= beyond:
        hint = f'choose quant "{other}", whose range is larger'
        what = f"{name} has a weight of magnitude {top.item():g}, and {end}"
        raise CompileError(what, where=f"quant={quant!r}", hint=hint)
    if not scales:
        return int(weight.count_nonzero() - stored.count_nonzero())
    # Scales that are limited: of int4, and of int8 subnormal ones, or 1 in the place of 0. [N, groups]
    scale, tiny = scales[0].reshape(len(weight), -1), torch.finfo(torch.float32).tiny
    is_int4 = stored.dtype == torch.uint8
    limited = scale <= SMALLEST_GROUP_SCALE if is_int4 else (scale < tiny) | (scale == 1)
    rows = limited.any(1)
    small, groups = weight[rows].abs(), limited[rows]
    if is_int4:
        groups = groups.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    return int(((small > 0) & (small < (SMALLEST_GROUP_SCALE / 2 if is_int4 else 127 * tiny)) & groups).sum())


LEAST_SHARE = 1e-4
"""Share of a weight from which its loss is told: of normally distributed weights a few are near 0 in any format."""


def warn_of_losses(quant: str, shares: Mapping[str, float]) -> None:
    """Warn of weights, name -> share of its values, of which a number format loses a share."""
    names = [f"{name} ({share:.2%})" for name, share in shares.items() if share >= LEAST_SHARE]
    for own, other, _, _, why in _FORMATS.values() if names else ():
        if own == quant:
            listed = ", ".join(names[:LISTED]) + f" and {len(names) - LISTED} more" * (len(names) > LISTED)
            warn(f'quant "{quant}" makes weights 0, because {why}: {listed}. Quant "{other}" has a larger range', 4)
