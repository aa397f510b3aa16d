"""combine-parallel-matmuls: matmuls of one input become one kernel, such as q, k and v, or gate and up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.linear.tiles import SMALL_BATCH
from fastcar_compile.codegen.tvm.kernels.registry import KIND, LINEARS, OPTIONS, dispatch, specialise
from fastcar_compile.codegen.tvm.relax_api import add_kernel, bindings_of, module_pass, tensor_type, untyped

# specialise-kernels: kernels that depend on the instruction set are replaced by those of another.


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
