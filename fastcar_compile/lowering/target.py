"""TVM target of the build machine."""

from __future__ import annotations

import tvm


def host_target(cpu: str | None = None) -> tvm.target.Target:
    """LLVM target with the host CPU's instruction set, or the named one's."""
    name = cpu or tvm.get_global_func("target.llvm_get_system_cpu")()
    return tvm.target.Target({"kind": "llvm", "mcpu": str(name)})
