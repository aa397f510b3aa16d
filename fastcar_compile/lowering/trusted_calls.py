"""Functions inside a library trust their caller: only the entry checks its arguments."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

_CHECKS = frozenset({"vm.builtin.check_tensor_info", "vm.builtin.match_shape"})


def trust_inner_calls(entry: str) -> Any:
    """A module pass: only the entry keeps the argument checks that TVM puts into every function.

    The entry calls the others with values whose types TVM itself has inferred. Per layer the checks cost two calls per
    argument in every step. Runs after `VMShapeLower`, which makes them.
    """

    @tvm.transform.module_pass(opt_level=0)
    def run(module: tvm.IRModule, _context: Any) -> tvm.IRModule:
        functions = {}
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function) and variable.name_hint != entry:
                function = _Unchecked(module).visit_expr(function)
            functions[variable] = function
        return tvm.IRModule(functions, attrs=module.attrs)

    return run


@mutator
class _Unchecked(PyExprMutator):
    """Drops the bindings that only check."""

    def visit_var_binding_(self, binding: Any) -> None:
        """Shapes are static, so that a check yields nothing that is used."""
        target = binding.value.op if isinstance(binding.value, relax.Call) else None
        if not (isinstance(target, relax.ExternFunc) and str(target.global_symbol) in _CHECKS):
            super().visit_var_binding_(binding)
