"""Instruction sets as data: what a library is compiled for, and what a CPU must offer to run it.

No TVM here: the runtime chooses a library with this module alone.
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from fastcar_compile.errors import CompileError, names_text
from fastcar_compile.support.machine import CPUINFO, cpu_flags

Int8 = Literal["portable", "vnni512", "amx", "vnni256", "madd", "smmla", "sdot", "smull", "dot"]
"""How int8 products are summed: plain vectors; vpdpbusd on 512 bits, also beside AMX's tiles, or on 256; vpmaddubsw;
smmla, and sdot for a single row; sdot; smull and sadalp; WebAssembly's i32x4.dot_i16x8_s."""

BFloat16 = Literal["", "vdpbf16ps", "tdpbf16ps", "bfmmla"]
"""What multiplies bfloat16 with bfloat16: nothing; AVX-512; AMX's tiles; Arm."""

NATIVE = "native"
"""In `host_cpus`: the best instruction set of the build machine."""


@dataclass(frozen=True)
class InstructionSet:
    """One row of the table.

    Args:
        name: in the manifest, in `host_cpus` and in folder names.
        triple: LLVM triple.
        cpu: LLVM CPU name, which also says what is fast.
        features: LLVM features beyond those of the CPU, with their sign.
        flags: what /proc/cpuinfo must list for a library of this set to run.
        llvm: LLVM features that a CPU name must imply for this set's kernels to suit it.
        float_lanes: float32 lanes of a register.
        int8: see `Int8`.
        float16: whether it converts between float16 and float32; else that takes integer arithmetic.
        bfloat16: see `BFloat16`.
        hosted: whether TVM's runtime is there; else a library calls its kernels itself (`codegen/tvm/standalone.py`).
    """

    name: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    flags: frozenset[str]
    llvm: tuple[str, ...]
    float_lanes: int
    int8: Int8
    float16: bool
    bfloat16: BFloat16 = ""
    hosted: bool = True

    @property
    def for_bfloat16(self) -> bool:
        """Whether it offers products of bfloat16 over the next one of the table, or tiles of them and of int8."""
        return self.machine == "x86_64" and self.bfloat16 != ""

    @property
    def machine(self) -> str:
        """The architecture as `platform.machine()` names it."""
        return self.triple.split("-", maxsplit=1)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the row with its sets in order."""
        return asdict(self) | {"flags": sorted(self.flags)}


PORTABLE = InstructionSet("portable", "", "", (), frozenset(), (), 4, "portable", False)
"""Plain vectors, for every CPU: what kernels are imported with. It is no row of the table."""

_X86, _ARM, _WASM = "x86_64-linux-gnu", "aarch64-linux-gnu", "wasm32-unknown-unknown"
_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512_vnni"}

_BF16, _V4_BF16 = ("+avx512vnni", "+avx512bf16"), _V4 | {"avx512_bf16"}
_AMX, _V4_AMX = (*_BF16, "+amx-bf16", "+amx-int8"), _V4_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_I8MM, _V8_6 = ("+dotprod", "+i8mm", "+bf16"), frozenset({"asimd", "asimddp", "i8mm", "bf16"})

_WASM_FEATURES = ("+simd128", "+bulk-memory", "+nontrapping-fptoint", "+sign-ext")
"""All of what every browser with SIMD has. Relaxed SIMD is left out: its results may differ between machines."""

INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    InstructionSet("avx512-amx", _X86, "x86-64-v4", _AMX, _V4_AMX, ("amx-int8",), 16, "amx", True, "tdpbf16ps"),
    InstructionSet(
        "avx512-bf16", _X86, "x86-64-v4", _BF16, _V4_BF16, ("avx512bf16",), 16, "vnni512", True, "vdpbf16ps"
    ),
    InstructionSet(
        "avx512-vnni", _X86, "x86-64-v4", ("+avx512vnni",), _V4, ("avx512bw", "avx512vnni"), 16, "vnni512", True
    ),
    InstructionSet(
        "avx2-vnni", _X86, "x86-64-v3", ("+avxvnni",), _V3 | {"avx_vnni"}, ("avx2", "avxvnni"), 8, "vnni256", True
    ),
    InstructionSet("avx2", _X86, "x86-64-v3", (), _V3, ("avx2", "fma", "f16c"), 8, "madd", True),
    InstructionSet("sse4", _X86, "x86-64-v2", (), _V2, ("sse4.2",), 4, "portable", False),
    InstructionSet("neon-i8mm", _ARM, "generic", _I8MM, _V8_6, ("i8mm", "bf16"), 4, "smmla", True, "bfmmla"),
    InstructionSet(
        "neon-dotprod", _ARM, "generic", ("+dotprod",), frozenset({"asimd", "asimddp"}), ("dotprod",), 4, "sdot", True
    ),
    InstructionSet("neon", _ARM, "cortex-a53", (), frozenset({"asimd", "crc32"}), ("neon",), 4, "smull", True),
    InstructionSet(
        "wasm-simd128", _WASM, "generic", _WASM_FEATURES, frozenset(), ("simd128",), 4, "dot", False, hosted=False
    ),
)
"""The instruction sets; the best set of every architecture stands first."""


def instruction_set(name: str) -> InstructionSet:
    """Return the row of that name.

    Raises:
        CompileError: there is none.
    """
    known = {isa.name: isa for isa in INSTRUCTION_SETS}
    if name not in known:
        hint = f"use some of: {names_text((*known, NATIVE), name)}"
        raise CompileError(f"unknown instruction set {name!r}", where="host_cpus", hint=hint)
    return known[name]


def instruction_sets(names: Sequence[str], quant: str = "") -> list[InstructionSet]:
    """Return the rows of these names, in the table's order, each once. "native" is the best one of this machine.

    quant: of the weights; see `host_instruction_set`.

    Raises:
        CompileError: an unknown name, or none at all.
    """
    if isinstance(names, str) or not names:
        text = f"host_cpus is a list of names, not {names!r}" if names else "no instruction set is named"
        raise CompileError(text, where="host_cpus", hint='give for example ["native", "avx2"]')
    chosen = {(host_instruction_set(quant) if name == NATIVE else instruction_set(name)).name for name in names}
    return [isa for isa in INSTRUCTION_SETS if isa.name in chosen]


def standalone_sets(triple: str) -> list[InstructionSet]:
    """Return those of a machine that has no runtime of TVM; empty for any other machine."""
    return [isa for isa in INSTRUCTION_SETS if isa.triple == triple and not isa.hosted]


def runnable(sets: Iterable[InstructionSet], machine: str, flags: frozenset[str]) -> list[InstructionSet]:
    """Return those that a CPU with these flags runs, the best one first."""
    able = {isa.name for isa in sets if isa.machine == machine and isa.flags <= flags}
    # In the order of the table, whatever order the sets came in.
    return [isa for isa in INSTRUCTION_SETS if isa.name in able]


def host_instruction_set(quant: str = "") -> InstructionSet:
    """Return the best one of this machine.

    quant: of the weights. bf16 gains by the sets that multiply bfloat16, and w8a8 by tiles. With others a library would
    gain nothing by them, and run on fewer CPUs.

    Raises:
        CompileError: the CPU runs none of the table.
    """
    machine, flags = platform.machine(), cpu_flags()
    # By vdpbf16ps Intel's CPUs, told by avx512_fp16, are slower than with float32, and AMD's twice as fast.
    pairs = {"vdpbf16ps"} if quant == "bf16" and "avx512_fp16" not in flags else set[str]()
    useful = pairs | ({"tdpbf16ps"} if quant in ("bf16", "w8a8") else set())
    sets = [isa for isa in INSTRUCTION_SETS if not isa.for_bfloat16 or isa.bfloat16 in useful]
    if able := runnable(sets, machine, flags):
        return able[0]
    names = [isa.name for isa in sets if isa.machine == machine]
    text = f"of {', '.join(names)}" if names else f"for {machine}"
    hint = "compile on a CPU with at least SSE 4.2 or NEON, or name the instruction sets: host_cpus"
    raise CompileError(f"this CPU runs no instruction set {text}", where=str(CPUINFO), hint=hint)


def cross_compiler(triple: str, machine: str) -> str:
    """Return what links for `triple` on a machine whose own triple is `machine`: the name of a C++ compiler, or zig."""
    if triple == _WASM:
        places = getattr(find_spec("ziglang"), "submodule_search_locations", None) or [""]
        return str(Path(places[0]) / "zig")
    return "g++" if triple == machine else f"{triple}-g++"


def to_install(triple: str, machine: str) -> str:
    """Return how to install that compiler."""
    if triple == _WASM:
        return 'pip install "fastcar_compile[wasm]"'
    return f"apt install {'g++' if triple == machine else 'g++-' + triple.replace('_', '-')} (Debian)"
