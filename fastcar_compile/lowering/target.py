"""TVM targets: the build machine, and the host CPU of a board."""

from __future__ import annotations

import tvm


def host_target(cpu: str | None = None, triple: str | None = None) -> tvm.target.Target:
    """LLVM target with the host CPU's instruction set, or the named one's.

    Args:
        cpu: LLVM CPU name; None: this machine's.
        triple: LLVM triple, for example aarch64-linux-gnu; None: this machine's.
    """
    name = cpu or tvm.get_global_func("target.llvm_get_system_cpu")()
    machine = {} if triple is None else {"mtriple": triple}
    return tvm.target.Target({"kind": "llvm", "mcpu": str(name)} | machine)
