"""flatten: one function for each entry. Layers are compiled once, and called nowhere."""

from collections.abc import Iterator, Mapping
from typing import cast

import tvm
from tvm import relax

from fastcar_compile.codegen.tvm.relax_api import bindings_of, module_pass, untyped, with_functions


def reachable(function: relax.Function) -> set[relax.Var]:
    """Return variables whose memory a result may be in: through every operand, as a callee may return its argument."""
    values = dict(all_bindings(function.body))
    found: set[relax.Var] = set()
    # From the results back: any operand of a call may be what the call returns.
    ahead = list(_variables(_body(function).body))
    while ahead:
        var = ahead.pop()
        if var not in found:
            found.add(var)
            ahead += _variables(values.get(var))
    return found


def _body(function: relax.Function) -> relax.SeqExpr:
    assert isinstance(function.body, relax.SeqExpr)
    return function.body


def _variables(value: relax.Expr | None) -> Iterator[relax.Var]:
    """Return the variables that the value is, or is made of."""
    if isinstance(value, relax.Var):
        yield value
    elif isinstance(value, relax.If):
        for branch in (value.true_branch, value.false_branch):
            assert isinstance(branch, relax.SeqExpr)
            yield from _variables(branch.body)
    elif isinstance(value, relax.TupleGetItem):
        yield from _variables(value.tuple_value)
    elif isinstance(value, relax.Call | relax.Tuple):
        for part in value.args if isinstance(value, relax.Call) else value.fields:
            yield from _variables(part)


def all_bindings(body: relax.Expr) -> Iterator[tuple[relax.Var, relax.Expr]]:
    """Return all variables with their values, those in branches too."""
    for var, value in bindings_of(body):
        yield var, value
        if isinstance(value, relax.If):
            yield from all_bindings(value.true_branch)
            yield from all_bindings(value.false_branch)


_STORAGE, _TENSOR, _KILL, _NULL = (
    tvm.ir.Op.get(f"relax.{name}") for name in ("vm.alloc_storage", "vm.alloc_tensor", "vm.kill_object", "null_value")
)
_VIEW = "vm.builtin.reshape"
_CHECKS = frozenset({"vm.builtin.check_tensor_info", "vm.builtin.match_shape"})

Values = dict[relax.Var, relax.Expr]
"""Variable of an inlined function -> what stands for it in the entry."""


def flatten(entries: Mapping[str, str]) -> tvm.transform.Pass:
    """Return the pass that puts the statements of all called functions into the entries.

    Args:
        entries: name of an entry -> name of the function that is to check its arguments.

    TVM lowers each distinct layer once. Its virtual machine then takes as much time as all the small kernels of a
    layer: for a call it counts references to every argument, for every buffer it asks an allocator, and every function
    checks its arguments. Two things follow from the inlining:

    - Layers share buffers. No two calls run at a time, so a buffer that a layer cannot return is made once.
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
            kept[module.get_global_var(entry)] = _Flattener(inner).entry(wholes[entry])
            kept[tvm.ir.GlobalVar(check)] = _checks(wholes[entry], check)
        # The kills that the statements lost are placed anew, after the last use in an entry.
        names = ("Normalize", "KillAfterLastUse", "LowerRuntimeBuiltin")
        finish = [getattr(relax.transform, name)() for name in names]
        return tvm.transform.Sequential(finish)(with_functions(module, kept))

    return module_pass("flatten", run)


class _Flattener:
    """Collects the statements of an entry.

    Attributes:
        _made: buffers that calls share, with what makes them; they stand before all other statements.
        _shared: by function, its variables for those buffers.
    """

    def __init__(self, functions: dict[str, relax.Function]) -> None:
        self._functions = functions
        self._made: list[relax.VarBinding] = []
        self._shared: dict[str, Values] = {}

    def entry(self, function: relax.Function) -> relax.Function:
        """Return the flat entry. Its own buffers are made where they were: its results are among them."""
        values = _checked(function)
        body = _body(function)
        statements = self._statements(body, values)
        whole = relax.SeqExpr(
            [untyped.BindingBlock(self._made), untyped.BindingBlock(statements)], _replaced(body.body, values)
        )
        return relax.Function(function.params, whole, function.ret_ty, function.is_pure, function.attrs)

    def _statements(self, body: relax.Expr, values: Values) -> list[relax.VarBinding]:
        """Return the statements with `values` for their variables, and add to `values` those that they define."""
        found: list[relax.VarBinding] = []
        for var, value in bindings_of(body):
            # A variable with a value before its statement is a shared buffer, or the result of a check.
            if var not in values:
                found += self._statement(var, value, values)
        return found

    def _statement(self, var: relax.Var, value: relax.Expr, values: Values) -> list[relax.VarBinding]:
        # A buffer that calls share must outlive the call, so the kills of a function are dropped.
        if _operator(value) == _KILL:
            return []
        # Names and tuples need no statement: their readers get what they stand for.
        if isinstance(value, relax.Var | relax.Tuple | relax.TupleGetItem):
            values[var] = _replaced(value, values)
            return []
        target = _operator(value)
        if isinstance(target, tvm.ir.GlobalVar) and target.name_hint in self._functions:
            arguments = [_replaced(a, values) for a in cast(relax.Call, value).args]
            statements, values[var] = self._call(target.name_hint, arguments)
            return statements
        if isinstance(value, relax.If):
            then, otherwise = (self._branch(b, values) for b in (value.true_branch, value.false_branch))
            value = relax.If(_replaced(value.cond, values), then, otherwise)
        else:
            value = _replaced(value, values)
        # A layer is inlined many times, and a variable may be bound once only.
        result = relax.Var(var.name, var.ty)
        values[var] = result
        return [relax.VarBinding(result, value)]

    def _branch(self, branch: relax.Expr, values: Values) -> relax.SeqExpr:
        assert isinstance(branch, relax.SeqExpr)
        inside = dict(values)  # what a branch defines is not seen outside of it
        statements = self._statements(branch, inside)
        return relax.SeqExpr([untyped.BindingBlock(statements)], _replaced(branch.body, inside))

    def _call(self, name: str, arguments: list[relax.Expr]) -> tuple[list[relax.VarBinding], relax.Expr]:
        """Return the statements of one call, and its result."""
        function = self._functions[name]
        # The first call makes the buffers; every further call of this function writes into the same ones.
        if name not in self._shared:
            self._shared[name] = self._share(function)
        values = {**self._shared[name], **dict(zip(function.params, arguments, strict=True)), **_checked(function)}
        statements = self._statements(function.body, values)
        return statements, _replaced(_body(function).body, values)

    def _share(self, function: relax.Function) -> Values:
        """Make the function's buffers, and views of them, that no result of it can share memory with."""
        # A buffer with a result in it may still be read when the next call of the function writes.
        kept = reachable(function)
        shared: Values = {}
        for var, value in bindings_of(function.body):
            # A tensor in a storage, and a view of a tensor: its memory is that of its first argument.
            derived = _operator(value) == _TENSOR or _packed(value) == _VIEW
            source = cast(relax.Call, value).args[0] if derived else None
            if var not in kept and (_operator(value) == _STORAGE or source in shared):
                made = relax.Var(var.name, var.ty)
                self._made.append(relax.VarBinding(made, _replaced(value, shared)))
                shared[var] = made
        return shared


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


def _replaced(value: relax.Expr, values: Values) -> relax.Expr:
    """Return the expression with its variables replaced, an element of a known tuple as that element."""
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


def _operator(value: relax.Expr) -> object:
    return value.op if isinstance(value, relax.Call) else None


def _packed(value: relax.Expr) -> str:
    """Return the name of the packed function that the value is a call of."""
    operator = _operator(value)
    return str(operator.global_symbol) if isinstance(operator, relax.ExternFunc) else ""


def _is_check(value: relax.Expr) -> bool:
    """Whether `VMShapeLower` put the value into the function. Shapes are static, so nothing uses its result."""
    return _packed(value) in _CHECKS or _operator(value) == _NULL
