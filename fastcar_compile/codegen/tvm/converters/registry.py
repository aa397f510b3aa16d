"""Converters by operator."""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload
from torch.fx.node import Target

from fastcar_compile.codegen.tvm.call import Call, Value

Converter = Callable[[Call], Value]
CONVERTERS: dict[Target, Converter] = {}
"""Operator -> what lowers it. TVM's importer lowers the operators that are not here."""


def converts(*operators: OpOverload) -> Callable[[Converter], Converter]:
    """Register a function as the converter of these operators."""

    def register(converter: Converter) -> Converter:
        CONVERTERS.update(dict.fromkeys(operators, converter))
        return converter

    return register
