"""schedule-elementwise: TVM's own elementwise kernels make no temporaries, and large ones run in parallel.

TVM fuses elementwise operators into one kernel, but computes each of them for the whole tensor: a reshape is a copy.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import tvm
from tvm import s_tir, tirx
from tvm.ir import TensorLoad
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.relax_api import module_pass, with_functions

PARALLEL_ELEMENTS = 1 << 16
"""Elements from which a second thread pays for launching and awaiting a parallel region."""

_DATA_PARALLEL = 0
"""TVM's kind of an axis whose iterations are independent."""


def schedule_elementwise() -> tvm.transform.Pass:
    """Return the pass that schedules every kernel of at least `PARALLEL_ELEMENTS` whose operators are all elementwise.

    An operator is computed where its value is used, if one other operator uses it, or if it only moves elements. But a
    product stays apart from a sum: LLVM would contract the two, and round once instead of twice.
    """

    def run(module: tvm.IRModule) -> tvm.IRModule:
        return with_functions(module, {v: _scheduled(f) for v, f in module.functions_items()})

    return module_pass("schedule-elementwise", run)


def _scheduled(function: Any) -> Any:
    if not isinstance(function, PrimFunc) or _is_own(function) or not _is_large(function):
        return function
    # A kernel with a reduction or another structure keeps TVM's schedule.
    schedule: Any = s_tir.Schedule(cast(Any, function))
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    if not all(_is_elementwise(schedule.get(block)) for block in blocks):
        return function
    for block in blocks[:-1]:
        if _can_move(schedule, block):
            schedule.compute_inline(block)
        else:
            _in_parallel(schedule, block)
    _in_parallel(schedule, blocks[-1])
    return schedule.mod["main"].with_attrs(function.attrs)


def _is_own(function: Any) -> bool:
    """Whether a kernel is one of `kernels/`: those have a schedule."""
    return function.attrs is not None and function.attrs.get("op_pattern", None) == OPAQUE


def _is_large(function: Any) -> bool:
    """Whether the result, the last argument of a kernel, has at least `PARALLEL_ELEMENTS`."""
    return prod(int(extent) for extent in function.params[-1].shape) >= PARALLEL_ELEMENTS


def _is_elementwise(block: Any) -> bool:
    """Whether each iteration of a block stores one element by an index of its own axes."""
    stores = isinstance(block.body, tirx.BufferStore) and len(block.writes) == 1
    return stores and bool(block.iter_vars) and all(axis.iter_type == _DATA_PARALLEL for axis in block.iter_vars)


def _can_move(schedule: Any, block: Any) -> bool:
    value = schedule.get(block).body.value
    users = [schedule.get(user).body.value for user in schedule.get_consumers(block)]
    # A pure move, such as a reshape, costs nothing where its value is read, whoever reads it.
    if isinstance(value, TensorLoad):
        return bool(users)
    return len(users) == 1 and (not isinstance(value, tirx.Mul) or isinstance(users[0], TensorLoad | tirx.Mul))


def _in_parallel(schedule: Any, block: Any) -> None:
    """Run the outer loops in parallel, all but the innermost, which LLVM vectorises."""
    loops = schedule.get_loops(block)
    if len(loops) > 1:
        schedule.parallel(schedule.fuse(*loops[:-1]) if len(loops) > 2 else loops[0])
