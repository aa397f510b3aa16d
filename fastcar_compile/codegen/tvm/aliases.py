"""Which variables of a function may share memory with its results."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax

from fastcar_compile.codegen.tvm.relax_api import bindings_of, body_of


def reachable(function: relax.Function) -> set[relax.Var]:
    """Return variables whose memory a result may be in: through every operand, as a callee may return its argument."""
    values = dict(all_bindings(function.body))
    found: set[relax.Var] = set()
    # From the results back: any operand of a call may be what the call returns.
    ahead = list(_variables(body_of(function).body))
    while ahead:
        var = ahead.pop()
        if var not in found:
            found.add(var)
            ahead += _variables(values.get(var))
    return found


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
