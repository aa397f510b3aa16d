"""Passes over the kernels of a module: for which instruction set they are, which are combined, how they run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import tvm
from tvm import relax, s_tir, tirx
from tvm.ir import TensorLoad
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm import relax_api
from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.codegen.tvm.kernels.linear.tiles import SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.registry import KIND, LINEARS, OPTIONS, dispatch, specialise
from fastcar_compile.codegen.tvm.relax_api import add_kernel, bindings_of, module_pass, tensor_type, untyped


def specialise_kernels(isa: InstructionSet) -> tvm.transform.Pass:
    """Return the pass that gives a module the kernels of `isa`, so that one import serves every library."""
    return module_pass("specialise-kernels", lambda module: specialise(module, isa))


_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


def combine_parallel_matmuls(isa: InstructionSet) -> tvm.transform.Pass:
    """Return the pass that combines matmuls of the same rows by parameters into one call of one kernel for `isa`.

    Their weights stay where they are: the kernel takes all of them. Equal calls must have been merged before, so that
    matmuls of one input have the very same rows. The single kernels stay in the module.
    """

    def run(module: tvm.IRModule) -> tvm.IRModule:
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function):
                module = _Combiner(module, function, isa).result(variable, function)
        return module

    return module_pass("combine-parallel-matmuls", run)


@dataclass(frozen=True)
class _Matmul:
    """A call of a linear kernel.

    Attributes:
        variable: its result [M, N].
        kind: of the kernel, a key of LINEARS.
        m: rows.
        n: outputs.
        k: inputs.
        rows: the arguments that matmuls of one input share.
        weights: its own arguments.
    """

    variable: relax.Var
    kind: str
    m: int
    n: int
    k: int
    rows: tuple[relax.Expr, ...]
    weights: tuple[relax.Expr, ...]


@mutator
class _Combiner(PyExprMutator):
    """Emits the one call in place of the first matmul of each group, and drops the others."""

    def __init__(self, module: tvm.IRModule, function: relax.Function, isa: InstructionSet) -> None:
        super().__init__(module)
        self._isa = isa
        self._group_of = {one.variable: group for group in _groups(module, function) for one in group}

    def result(self, variable: tvm.ir.GlobalVar, function: relax.Function) -> tvm.IRModule:
        """Return the module with that function rewritten."""
        if self._group_of:
            rewritten = self.visit_expr(function)
            assert isinstance(rewritten, relax.Function)
            self.builder_.update_func(variable, rewritten)
        return self.builder_.get()

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Rewrite the first matmul of a group; the later ones have their values already."""
        group = self._group_of.get(binding.var)
        if group is None:
            super().visit_var_binding_(binding)
        # At the first matmul all rows and weights are known: the rows are its own, and weights are parameters.
        elif binding.var.same_as(group[0].variable):
            together = self.builder_.emit(self._call(group))
            for i, one in enumerate(group):
                self.set_var_remap(one.variable, self.builder_.emit(relax.TupleGetItem(together, i)))

    def _call(self, group: Sequence[_Matmul]) -> relax.Call:
        first = group[0]
        kernel = dispatch(self._isa, "linears", first.kind, first.m, tuple(one.n for one in group), first.k)
        arguments = [*first.rows, *(weight for one in group for weight in one.weights)]
        types = [tensor_type((one.m, one.n), "float32") for one in group]
        return untyped.call_tir(add_kernel(self.builder_, kernel), [self.visit_expr(a) for a in arguments], types)


def _groups(module: tvm.IRModule, function: relax.Function) -> list[list[_Matmul]]:
    """Return matmuls that can run together, two or more, in the order of the function."""
    parameters = set(function.params)
    groups: dict[tuple[object, ...], list[_Matmul]] = {}
    for variable, value in bindings_of(function.body):
        found = _matmul(module, variable, value)
        # A weight that the function computes may be bound behind the first matmul, so it cannot join its call.
        if found is not None and parameters.issuperset(found.weights):
            groups.setdefault((found.kind, found.m, found.k, *found.rows), []).append(found)
    return [group for group in groups.values() if len(group) > 1]


def _matmul(module: tvm.IRModule, variable: relax.Var, call: relax.Expr) -> _Matmul | None:
    """Return the matmul that is bound to the variable, if its kernel can be combined; else None."""
    if not isinstance(call, relax.Call) or call.op != _CALL_TIR:
        return None
    kernel = module[call.args[0]]
    if not isinstance(kernel, PrimFunc) or kernel.attrs is None or str(kernel.attrs.get(KIND)) not in LINEARS:
        return None
    kind = str(kernel.attrs[KIND])
    # Kernels carry their kind and options as attributes, by which another kernel is asked for.
    m, n, k = json.loads(str(kernel.attrs[OPTIONS]))
    linear, arguments = LINEARS[kind], tuple(cast(relax.Tuple, call.args[1]).fields)
    # With more rows a kernel is more than one parallel loop, and only single loops are joined.
    if m > SMALL_BATCH:
        return None
    return _Matmul(variable, kind, m, n, k, arguments[: linear.activations], arguments[linear.activations :])


# schedule-elementwise: TVM's own elementwise kernels make no temporaries, and large ones run in parallel.
#
# TVM fuses elementwise operators into one kernel, but computes each of them for the whole tensor: a reshape is a copy.


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
        return relax_api.with_functions(module, {v: _scheduled(f) for v, f in module.functions_items()})

    return module_pass("schedule-elementwise", run)


def _scheduled(function: Any) -> Any:
    # Kernels of `kernels/` have a schedule. The last argument is the result.
    if not isinstance(function, PrimFunc) or dict(function.attrs or {}).get("op_pattern") == OPAQUE:
        return function
    result: Any = list(cast(Any, function).params)[-1]
    if prod(int(extent) for extent in result.shape) < PARALLEL_ELEMENTS:
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


# no-alias: every kernel's arguments are buffers of their own, and its code may rely on it.


_NO_ALIAS = "tirx.noalias"


def no_alias() -> tvm.transform.Pass:
    """Return the pass that marks every kernel.

    Nothing calls a kernel with one buffer twice if the kernel writes to it: an in-place kernel has one argument for
    what it reads and writes. TVM's code generator asks the last kernel of a library, and treats all others like it. So
    one kernel without the mark makes a whole library larger, and slower to compile.
    """

    def run(module: tvm.IRModule) -> tvm.IRModule:
        functions: dict[Any, Any] = dict(module.functions_items())
        marked = {v: f.with_attr(_NO_ALIAS, True) if isinstance(f, PrimFunc) else f for v, f in functions.items()}
        return relax_api.with_functions(module, marked)

    return module_pass("no-alias", run)
