"""Linears of one input as one kernel: q, k and v of an attention, gate and up of an MLP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.codegen.tvm.kernels.registry import KIND, LINEARS, OPTIONS, dispatch

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


def share_rows(isa: InstructionSet) -> Any:
    """A module pass: linears that multiply the same rows by parameters become one call of one kernel for `isa`.

    Their weights stay where they are: the kernel takes all of them. Equal calls must have been merged before, so that
    linears of one input have the very same rows. The single kernels are left in the module.
    """

    @tvm.transform.module_pass(opt_level=0)
    def run(module: tvm.IRModule, _context: Any) -> tvm.IRModule:
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function):
                module = _Sharing(module, function, isa).result(variable, function)
        return module

    return run


@mutator
class _Sharing(PyExprMutator):
    """Emits the one call in place of the first of its linears, and drops the others."""

    def __init__(self, module: tvm.IRModule, function: relax.Function, isa: InstructionSet) -> None:
        super().__init__(module)
        self._module, self._isa = module, isa
        self._group_of = {one.var: group for group in _groups(module, function) for one in group}

    def result(self, variable: tvm.ir.GlobalVar, function: relax.Function) -> tvm.IRModule:
        """The module with that function rewritten."""
        if self._group_of:
            self.builder_.update_func(variable, self.visit_expr(function))
        return self.builder_.get()

    def visit_var_binding_(self, binding: Any) -> None:
        """Later members of a group have their values already."""
        group = self._group_of.get(binding.var)
        if group is None:
            super().visit_var_binding_(binding)
        elif binding.var.same_as(group[0].var):
            together = self.builder_.emit(self._call([one.value for one in group]))
            for i, one in enumerate(group):
                self.set_var_remap(one.var, self.builder_.emit(relax.TupleGetItem(together, i)))

    def _call(self, calls: Sequence[Any]) -> relax.Call:
        kind, (m, _, k) = _kernel(self._module, calls[0])  # type: ignore[misc]
        kernel = dispatch(self._isa, "linears", kind, m, tuple(int(call.ty_args[0].shape[1]) for call in calls), k)
        shared = LINEARS[kind].activations
        arguments = [*calls[0].args[1].fields[:shared], *(a for call in calls for a in call.args[1].fields[shared:])]
        target = self.builder_.add_func(kernel, kernel.__name__)
        return relax.call_tir(target, [self.visit_expr(a) for a in arguments], [call.ty_args[0] for call in calls])


def _kernel(module: tvm.IRModule, value: Any) -> tuple[str, list[int]] | None:
    """Kind and options [m, n, k] of the linear kernel that is called; None where the value is no such call."""
    if not isinstance(value, relax.Call) or value.op != _CALL_TIR:
        return None
    kernel = module[value.args[0]]
    if not isinstance(kernel, PrimFunc) or kernel.attrs is None or str(kernel.attrs.get(KIND)) not in LINEARS:
        return None
    return str(kernel.attrs[KIND]), json.loads(str(kernel.attrs[OPTIONS]))


def _groups(module: tvm.IRModule, function: relax.Function) -> list[list[Any]]:
    """Bindings of linears that can run together, two or more, in the order of the function."""
    parameters = set(function.params)
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            found = _kernel(module, binding.value)
            if found is None:
                continue
            kind, (m, _, k) = found
            arguments = list(binding.value.args[1])
            linear = LINEARS[kind]
            rows, own = arguments[: linear.activations], arguments[linear.activations :]
            if (linear.max_rows is None or m <= linear.max_rows) and parameters.issuperset(own):
                groups.setdefault((kind, m, k, *rows), []).append(binding)
    return [group for group in groups.values() if len(group) > 1]
