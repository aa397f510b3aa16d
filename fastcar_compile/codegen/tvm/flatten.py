"""One function for a step: layers are compiled once, and called nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax

_STORAGE, _TENSOR, _KILL, _NULL = (
    tvm.ir.Op.get(f"relax.{name}") for name in ("vm.alloc_storage", "vm.alloc_tensor", "vm.kill_object", "null_value")
)
_VIEW = "vm.builtin.reshape"
_CHECKS = frozenset({"vm.builtin.check_tensor_info", "vm.builtin.match_shape"})

Values = dict[relax.Var, relax.Expr]


def flatten(entry: str, check: str) -> Any:
    """A module pass: the entry with the statements of the functions that it calls, and of those that they call.

    TVM lowers each distinct layer once. Its virtual machine then takes as much time as all the small kernels of a
    layer: for a call it counts references to every argument, for every buffer it asks an allocator, and every function
    checks its arguments. Here buffers that a layer cannot return are made once for all layers, as no two calls run at a
    time, and the checks of the entry's arguments are a function of their own, `check`, for a caller whose arguments
    stay the same. Runs after `VMShapeLower`, on functions that do not call themselves.
    """

    @tvm.transform.module_pass(opt_level=0)
    def run(module: tvm.IRModule, _context: Any) -> tvm.IRModule:
        inner = {v.name_hint: f for v, f in module.functions_items() if isinstance(f, relax.Function)}
        whole = inner.pop(entry)
        kept = {v: f for v, f in module.functions_items() if v.name_hint not in inner}
        kept[module.get_global_var(entry)] = _Flattener(inner).entry(whole)
        kept[tvm.ir.GlobalVar(check)] = _checks(whole, check)
        names = ("Normalize", "KillAfterLastUse", "LowerRuntimeBuiltin")
        finish = [getattr(relax.transform, name)() for name in names]
        return tvm.transform.Sequential(finish)(tvm.IRModule(kept, attrs=module.attrs))

    return run


class _Flattener:
    """Collects the statements of an entry.

    Attributes:
        made: buffers that calls share. shared: by function, its variables for them.
    """

    def __init__(self, functions: dict[str, relax.Function]) -> None:
        self._functions = functions
        self._made: list[relax.VarBinding] = []
        self._shared: dict[str, Values] = {}

    def entry(self, function: relax.Function) -> relax.Function:
        """The entry's own buffers are made where they were, as its results are among them."""
        values = _checked(function)
        body = self._body(function.body, values)
        result = _replaced(function.body.body, values)
        blocks = [relax.BindingBlock(self._made), relax.BindingBlock(body)]
        return relax.Function(
            function.params, relax.SeqExpr(blocks, result), function.ret_ty, function.is_pure, function.attrs
        )

    def _body(self, body: relax.SeqExpr, values: Values) -> list[relax.VarBinding]:
        """The statements, with `values` for variables that were replaced; adds those that these statements define."""
        found: list[relax.VarBinding] = []
        for block in body.blocks:
            for binding in block.bindings:
                if binding.var not in values:
                    found += self._statement(binding.var, binding.value, values)
        return found

    def _statement(self, var: relax.Var, value: Any, values: Values) -> list[relax.VarBinding]:
        if _operator(value) == _KILL:  # they are placed anew
            return []
        if isinstance(value, relax.Var | relax.Tuple | relax.TupleGetItem):
            values[var] = _replaced(value, values)
            return []
        if isinstance(_operator(value), tvm.ir.GlobalVar) and value.op.name_hint in self._functions:
            statements, values[var] = self._call(value.op.name_hint, [_replaced(a, values) for a in value.args])
            return statements
        if isinstance(value, relax.If):
            branches = (self._branch(b, values) for b in (value.true_branch, value.false_branch))
            value = relax.If(_replaced(value.cond, values), *branches)
        else:
            value = _replaced(value, values)
        values[var] = relax.Var(var.name, var.ty)
        return [relax.VarBinding(values[var], value)]

    def _branch(self, branch: relax.SeqExpr, values: Values) -> relax.SeqExpr:
        inside = dict(values)
        statements = self._body(branch, inside)
        return relax.SeqExpr([relax.BindingBlock(statements)], _replaced(branch.body, inside))

    def _call(self, name: str, arguments: list[relax.Expr]) -> tuple[list[relax.VarBinding], relax.Expr]:
        function = self._functions[name]
        if name not in self._shared:
            self._shared[name] = self._share(function)
        values = {**self._shared[name], **dict(zip(function.params, arguments, strict=True)), **_checked(function)}
        return self._body(function.body, values), _replaced(function.body.body, values)

    def _share(self, function: relax.Function) -> Values:
        """Make the function's buffers, and views of them, that no result of it can share memory with."""
        kept = _reachable(function)
        shared: Values = {}
        for block in function.body.blocks:
            for binding in block.bindings:
                var, value = binding.var, binding.value
                source = value.args[0] if _operator(value) == _TENSOR or _is_view(value) else None
                if var not in kept and (_operator(value) == _STORAGE or source in shared):
                    shared[var] = relax.Var(var.name, var.ty)
                    self._made.append(relax.VarBinding(shared[var], _replaced(value, shared)))
        return shared


def _checked(function: relax.Function) -> Values:
    """The variables of the function's checks, standing for themselves, as nothing uses them."""
    return {var: var for var, value in _bindings(function.body) if _is_check(value)}


def _checks(function: relax.Function, name: str) -> relax.Function:
    """A function of the same arguments that only checks them."""
    found = [relax.VarBinding(var, value) for var, value in _bindings(function.body) if _is_check(value)]
    body = relax.SeqExpr([relax.BindingBlock(found)], relax.Tuple([]))
    only = relax.Function(function.params, body, relax.TupleType([]), function.is_pure, function.attrs)
    named = relax.utils.copy_with_new_vars(only).with_attr("global_symbol", name)
    assert isinstance(named, relax.Function)
    return named


def _replaced(value: Any, values: Values) -> Any:
    """The expression with its variables replaced, and without tuples that are taken apart."""
    if isinstance(value, relax.Var):
        return values.get(value, value)
    if isinstance(value, relax.Call):
        return relax.Call(value.op, [_replaced(a, values) for a in value.args], value.attrs, value.ty_args, value.span)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([_replaced(f, values) for f in value.fields])
    if isinstance(value, relax.TupleGetItem):
        whole = _replaced(value.tuple_value, values)
        return whole.fields[value.index] if isinstance(whole, relax.Tuple) else relax.TupleGetItem(whole, value.index)
    return value


def _reachable(function: relax.Function) -> set[relax.Var]:
    """Variables whose memory a result may be in: through every operand, as a callee may return its argument."""
    values = dict(_bindings(function.body))
    found: set[relax.Var] = set()
    ahead = list(_variables(function.body.body))
    while ahead:
        var = ahead.pop()
        if var not in found:
            found.add(var)
            ahead += _variables(values.get(var))
    return found


def _variables(value: Any) -> Iterator[relax.Var]:
    """The variables that the value is, or is made of."""
    if isinstance(value, relax.Var):
        yield value
    elif isinstance(value, relax.If):
        yield from _variables(value.true_branch.body)
        yield from _variables(value.false_branch.body)
    elif isinstance(value, relax.TupleGetItem):
        yield from _variables(value.tuple_value)
    elif isinstance(value, relax.Call | relax.Tuple):
        for part in value.args if isinstance(value, relax.Call) else value.fields:
            yield from _variables(part)


def _bindings(body: relax.SeqExpr) -> Iterator[tuple[relax.Var, Any]]:
    """All variables with their values, those in branches too."""
    for block in body.blocks:
        for binding in block.bindings:
            yield binding.var, binding.value
            if isinstance(binding.value, relax.If):
                yield from _bindings(binding.value.true_branch)
                yield from _bindings(binding.value.false_branch)


def _operator(value: Any) -> Any:
    return value.op if isinstance(value, relax.Call) else None


def _packed(value: Any) -> str:
    """Name of the packed function that the value is a call of."""
    operator = _operator(value)
    return str(operator.global_symbol) if isinstance(operator, relax.ExternFunc) else ""


def _is_view(value: Any) -> bool:
    return _packed(value) == _VIEW


def _is_check(value: Any) -> bool:
    """What `VMShapeLower` puts into every function; shapes are static, so that nothing uses its result."""
    return _packed(value) in _CHECKS or _operator(value) == _NULL
