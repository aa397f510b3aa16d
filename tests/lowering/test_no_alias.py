"""Every kernel of a library may rely on its arguments being buffers of their own."""

from __future__ import annotations

import re

from fastcar_compile.codegen.tvm.isa import host_instruction_set

from .programs import Case, lowered_whole


def test_the_code_generator_believes_it() -> None:
    """In LLVM a kernel is a function whose pointers are `noalias`. Without the mark it is inlined."""
    text = lowered_whole(Case()).executable.mod.imports[0].inspect_source("ll")
    kernels = re.findall(r"^define .*@__tvm_ffi_(\w+)\(", text, re.MULTILINE)
    bodies = dict(re.findall(r"^define .*@(\w+)_compute_\((.*)", text, re.MULTILINE))
    assert {"append", "decide_and_count", "attend", "attend_chunk"} <= set(kernels) == set(bodies)
    assert all("noalias" in arguments for arguments in bodies.values())
    assert host_instruction_set().cpu in text
