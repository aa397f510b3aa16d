"""flatten: one function for each entry. Layers are compiled once, and called nowhere."""

from collections.abc import Iterator, Mapping
from typing import cast

import tvm
from tvm import relax

from fastcar_compile.codegen.tvm.buffers import shared
from fastcar_compile.codegen.tvm.relax_api import (
    Values,
    bindings_of,
    module_pass,
    operator_of,
    packed_name,
    replaced,
    untyped,
    with_functions,
)


def _body(function: relax.Function) -> relax.SeqExpr:
    assert isinstance(function.body, relax.SeqExpr)
    return function.body


def all_bindings(body: relax.Expr) -> Iterator[tuple[relax.Var, relax.Expr]]:
    """Return all variables with their values, those in branches too."""
    for var, value in bindings_of(body):
        yield var, value
        if isinstance(value, relax.If):
            yield from all_bindings(value.true_branch)
            yield from all_bindings(value.false_branch)


_KILL, _NULL = (tvm.ir.Op.get(f"relax.{name}") for name in ("vm.kill_object", "null_value"))
_CHECKS = frozenset({"vm.builtin.check_tensor_info", "vm.builtin.match_shape"})


def flatten(entries: Mapping[str, str], *, share: bool = True) -> tvm.transform.Pass:
    """Return the pass that puts the statements of all called functions into the entries.

    Args:
        entries: name of an entry -> name of the function that is to check its arguments.
        share: whether buffers are shared by all layers.

    TVM lowers each distinct layer once. Its virtual machine then takes as much time as all the small kernels of a
    layer: for a call it counts references to every argument, for every buffer it asks an allocator, and every function
    checks its arguments. Two things follow from the inlining:

    - Buffers are shared by all layers (`shared`), where the target does not plan them itself.
    - The checks of an entry's arguments are a function of their own. A caller whose arguments stay the same calls it
      once.

    The pass runs after `VMShapeLower`, on functions that do not call themselves.
    """

    def run(module: tvm.IRModule) -> tvm.IRModule:
        inner = {v.name_hint: f for v, f in module.functions_items() if isinstance(f, relax.Function)}
        # What is left in `inner` are layers and branches, which are called only from entries or from each other.
        wholes = {entry: inner.pop(entry) for entry in entries}
        kept = {v: f for v, f in module.functions_items() if v.name_hint not in inner}
        for entry, check in entries.items():
            kept[module.get_global_var(entry)] = _Flattener(inner).entry(wholes[entry], share)
            kept[tvm.ir.GlobalVar(check)] = _checks(wholes[entry], check)
        # A buffer is never killed: the storage of all of them is given back when the entry returns.
        finish = [relax.transform.Normalize(), relax.transform.LowerRuntimeBuiltin()]
        return tvm.transform.Sequential(finish)(with_functions(module, kept))

    return module_pass("flatten", run)


class _Flattener:
    """Collects the statements of an entry."""

    def __init__(self, functions: dict[str, relax.Function]) -> None:
        self._functions = functions

    def entry(self, function: relax.Function, share: bool) -> relax.Function:
        """Return the flat entry."""
        values = _checked(function)
        statements = self._statements(function.body, values)
        results = replaced(_body(function).body, values)
        body = shared(statements, results) if share else statements
        whole = relax.SeqExpr([untyped.BindingBlock(body)], results)
        return relax.Function(function.params, whole, function.ret_ty, function.is_pure, function.attrs)

    def _statements(self, body: relax.Expr, values: Values) -> list[relax.VarBinding]:
        """Return the statements with `values` for their variables, and add to `values` those that they define."""
        found: list[relax.VarBinding] = []
        for var, value in bindings_of(body):
            # A variable with a value before its statement is the result of a check.
            if var not in values:
                found += self._statement(var, value, values)
        return found

    def _statement(self, var: relax.Var, value: relax.Expr, values: Values) -> list[relax.VarBinding]:
        if operator_of(value) == _KILL:
            return []
        # Names and tuples need no statement: their readers get what they stand for.
        if isinstance(value, relax.Var | relax.Tuple | relax.TupleGetItem):
            values[var] = replaced(value, values)
            return []
        target = operator_of(value)
        if isinstance(target, tvm.ir.GlobalVar) and target.name_hint in self._functions:
            arguments = [replaced(a, values) for a in cast(relax.Call, value).args]
            statements, values[var] = self._call(target.name_hint, arguments)
            return statements
        if isinstance(value, relax.If):
            then, otherwise = (self._branch(b, values) for b in (value.true_branch, value.false_branch))
            value = relax.If(replaced(value.cond, values), then, otherwise)
        else:
            value = replaced(value, values)
        # A layer is inlined many times, and a variable may be bound once only.
        result = relax.Var(var.name, var.ty)
        values[var] = result
        return [relax.VarBinding(result, value)]

    def _branch(self, branch: relax.Expr, values: Values) -> relax.SeqExpr:
        assert isinstance(branch, relax.SeqExpr)
        inside = dict(values)  # what a branch defines is not seen outside of it
        statements = self._statements(branch, inside)
        return relax.SeqExpr([untyped.BindingBlock(statements)], replaced(branch.body, inside))

    def _call(self, name: str, arguments: list[relax.Expr]) -> tuple[list[relax.VarBinding], relax.Expr]:
        """Return the statements of one call, and its result."""
        function = self._functions[name]
        values = {**dict(zip(function.params, arguments, strict=True)), **_checked(function)}
        statements = self._statements(function.body, values)
        return statements, replaced(_body(function).body, values)


def _checked(function: relax.Function) -> Values:
    """Return the variables of the function's checks, standing for themselves: nothing uses them."""
    return {var: var for var, value in all_bindings(function.body) if _is_check(value)}


def _checks(function: relax.Function, name: str) -> relax.Function:
    """Return a function of the same arguments that only checks them."""
    found = [relax.VarBinding(var, value) for var, value in all_bindings(function.body) if _is_check(value)]
    body = relax.SeqExpr([untyped.BindingBlock(found)], relax.Tuple([]))
    only = relax.Function(function.params, body, relax.TupleType([]), function.is_pure, function.attrs)
    # Both functions are in one module, so they must not share variables.
    named = relax.utils.copy_with_new_vars(only).with_attr("global_symbol", name)
    assert isinstance(named, relax.Function)
    return named


def _is_check(value: relax.Expr) -> bool:
    """Whether `VMShapeLower` put the value into the function. Shapes are static, so nothing uses its result."""
    return packed_name(value) in _CHECKS or operator_of(value) == _NULL
