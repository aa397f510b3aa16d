"""no-alias: every kernel's arguments are buffers of their own, and its code may rely on it."""

from __future__ import annotations

from typing import Any, cast

import tvm
from tvm.tirx import PrimFunc

from fastcar_compile.codegen.tvm.relax_api import module_pass, with_functions

_NO_ALIAS = "tirx.noalias"


def no_alias() -> tvm.transform.Pass:
    """Return the pass that marks every kernel.

    Nothing calls a kernel with one buffer twice if the kernel writes to it: an in-place kernel has one argument for
    what it reads and writes. TVM's code generator asks the last kernel of a library, and treats all others like it. So
    one kernel without the mark makes a whole library larger, and slower to compile.
    """

    def run(module: tvm.IRModule) -> tvm.IRModule:
        return with_functions(module, {v: _marked(f) for v, f in module.functions_items()})

    return module_pass("no-alias", run)


def _marked(function: Any) -> Any:
    return cast(Any, function).with_attr(_NO_ALIAS, True) if isinstance(function, PrimFunc) else function
