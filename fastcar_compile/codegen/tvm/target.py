"""TVM targets: an instruction set of the table, or the host CPU of a board."""

from dataclasses import replace

import tvm

from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet, host_instruction_set
from fastcar_compile.errors import TargetError


def host_target(isa: InstructionSet | None = None) -> tvm.target.Target:
    """Return the LLVM target of an instruction set; None: of the best one of this machine."""
    chosen = isa or host_instruction_set()
    options = {"kind": "llvm", "mtriple": chosen.triple, "mcpu": chosen.cpu}
    options |= {"mattr": list(chosen.features)} if chosen.features else {}
    # What TVM takes for this machine anyway, with a warning.
    return tvm.target.Target(options | ({} if chosen.hosted else {"vector-width": 32 * chosen.float_lanes}))


def board_instruction_set(cpu: str, triple: str) -> InstructionSet:
    """Return the best instruction set that a CPU with this LLVM name runs, compiled for that very CPU.

    Raises:
        TargetError: LLVM does not know the CPU, or it runs none of the table.
    """
    machine = triple.split("-", maxsplit=1)[0]
    table = [isa for isa in INSTRUCTION_SETS if isa.machine == machine and not isa.for_bfloat16]
    if not table:
        known = ", ".join(sorted({isa.triple for isa in INSTRUCTION_SETS}))
        raise TargetError(f"there are no kernels for {triple}", where="host.triple", hint=f"known: {known}")
    # LLVM would ignore the name of a CPU that it does not know.
    plain = tvm.target.Target({"kind": "llvm", "mtriple": triple})
    if cpu not in tvm.get_global_func("target.llvm_get_cpu_archlist")(plain):
        raise TargetError(f"LLVM knows no CPU {cpu!r} for {triple}", where="host.cpu", hint="use LLVM's name of it")
    offers = tvm.get_global_func("target.target_has_feature")
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": triple})
    for isa in table:
        if all(offers(feature, target) for feature in isa.llvm):
            # The CPU's name implies its features; more of them could name what this CPU lacks.
            return replace(isa, cpu=cpu, triple=triple, features=())
    what = f"{cpu} runs none of the instruction sets {', '.join(isa.name for isa in table)}"
    raise TargetError(what, where="host.cpu", hint=f"a host CPU needs at least {', '.join(table[-1].llvm)}")
