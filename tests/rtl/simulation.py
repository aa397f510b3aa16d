"""The RTL of a design with Verilator: its units against the emitted C++, and its engine in a library for ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from hls.library import Array, Linear, assert_same_bits, random_layer, reference
from step.decoder import Decoder
from step.kernel import Kernel

from fastcar_compile.artifact.engine import EngineProduct, float_words
from fastcar_compile.codegen.hls.control_table.table import DrsTable, Limits
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import KernelInterface, weight_ports
from fastcar_compile.codegen.hls.model.engine import EngineMemory
from fastcar_compile.codegen.hls.packing import pack_mlp
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.runtime.backends.hls_csim import aligned, ap_types_folder

HERE = Path(__file__).parent
OP_MLP, OP_LINEAR, OP_LINEAR_BIAS = range(3)
LINT = ("-Wall", "-Wno-DECLFILENAME", "-Wno-UNUSEDSIGNAL", "-Wno-VARHIDDEN", "-Wno-SYMRSVDWORD")
"""Every warning of Verilator is an error, but for bits that nobody reads, names of functions' arguments, and the name
`interrupt`, which UG1393 asks for."""

FAST = ("--x-assign", "fast", "--x-initial", "fast")
FLAGS = ("-std=gnu++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas")


@cache
def _verilator_includes() -> list[str]:
    done = subprocess.run(["verilator", "--getenv", "VERILATOR_ROOT"], capture_output=True, text=True, check=True)
    include = Path(done.stdout.strip()) / "include"
    return [f"-I{include}", f"-I{include / 'vltstd'}"]


ENGINE = Path("fastcar_engine.v")
SIGNALS = ("arvalid", "arready", "araddr", "arlen", "arsize", "arburst", "rvalid", "rready", "rlast", "rdata")


def _ports(made: Design, whole: bool) -> str:
    """Return the header engine_ports.hpp."""
    weights = weight_ports(made)
    ports = (", ".join(f"&dut.m_axi_{port.bundle}_{name}" for name in SIGNALS) for port in weights)
    types = {"araddr": "QData", "rdata": "void"}
    return f"""{"#define FASTCAR_STEP" if whole else ""}
struct Signals {{ {" ".join(f"{types.get(name, 'CData')}* {name};" for name in SIGNALS)} }};
#define ENGINE_PORTS(dut) std::vector<Signals>{{{", ".join(f"{{{own}}}" for own in ports)}}}
#define ENGINE_SIGNATURE {KernelInterface("fastcar_engine", tuple(weights)).signature()}
#define ENGINE_SECTIONS {{{", ".join(port.name for port in weights)}}}
"""


def _checked(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Builder:
    """Builds benches in a folder that all of them share.

    Args:
        optimise: of g++: "-O0" is soonest built, "-O2" runs longest simulations soonest.
    """

    folder: Path
    optimise: str = "-O0"

    def build(
        self,
        made: Design,
        top: Path,
        bench: str,
        output: str,
        *options: str,
        limits: Limits | None = None,
        whole: tuple[DrsTable, StepDesign] | None = None,
    ) -> Path:
        """Emit the project of `made`, and build `bench` with what Verilator makes of `top`; return its path.

        Args:
            limits: of the controller, other ones than the project's.
            whole: the kernel of whole steps, which meets the engine; None: the bench meets it.
        """
        out, (table, step) = self.folder / output, whole or (None, None)
        emit_hls(made, out / "hls", table, step=step)
        (out / "engine_ports.hpp").write_text(_ports(made, whole is not None))
        if limits is not None:
            (out / "fastcar_drs_config.hpp").write_text(render("fastcar_drs_config.hpp", limits=limits))
        rtl = out / "hls" / "rtl"
        top = top if top.is_absolute() else rtl / top
        places = (f"-I{rtl}", "-y", rtl, "--Mdir", out)
        _checked("verilator", "--cc", "-O3", *FAST, *LINT, *options, *places, "--top-module", top.stem, top)
        made_sources = sorted(path for path in out.glob("*.cpp") if path.name != "all.cpp")
        (out / "all.cpp").write_text("".join(f'#include "{path.name}"\n' for path in made_sources))
        includes = [f"-I{out}", f"-I{out / 'hls'}", "-isystem", ap_types_folder(), *_verilator_includes()]
        kind = [] if bench.endswith("units.cpp") else ["-shared"]
        path = out / f"{top.stem}.bin"
        sources = (out / "all.cpp", HERE / bench, self._runtime())
        _checked("g++", *FLAGS, self.optimise, *kind, *includes, *sources, "-o", path)
        return path

    def _runtime(self) -> Path:
        """Return Verilator's own library, built once."""
        path = self.folder / "runtime.o"
        if not path.is_file():
            includes = _verilator_includes()
            names = ("verilated.cpp", "verilated_threads.cpp")
            own = self.folder / "runtime.cpp"
            own.write_text("".join(f'#include "{name}"\n' for name in names))
            _checked("g++", *FLAGS, self.optimise, *includes, "-c", own, "-o", path)
        return path


class _Memory(ctypes.Structure):
    _fields_ = [
        ("rate", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("latency", "refresh_interval", "refresh", "held")),
    ]

    @classmethod
    def of(cls, memory: EngineMemory, held: int) -> _Memory:
        """The memory as engine.cpp takes it; the model's rate is a mean over time, refreshes included."""
        rate = memory.rate / (1 - memory.refreshing)
        return cls(rate, memory.latency, round(memory.refresh_interval), round(memory.refresh), held)


def step_kernel(made: Decoder, builder: Builder, name: str, memory: EngineMemory, held: int) -> Kernel:
    """Return the kernel of whole steps of a decoder, whose engine is the RTL."""
    step = StepDesign.of(made.program, 2)
    path = builder.build(made.made, ENGINE, "engine.cpp", name, whole=(made.table, step))
    return Kernel(loaded(path, memory, held), made, step)


def loaded(path: Path, memory: EngineMemory, held: int = 0) -> ctypes.CDLL:
    """Return the library of a kernel of whole steps whose engine, the RTL, reads this memory.

    It counts in `fastcar_clocks`, int64, the clocks of all linears and MLPs: see Engine in engine.cpp.
    """
    library = ctypes.CDLL(str(path))
    ctypes.pointer(_Memory.in_dll(library, "fastcar_memory"))[0] = _Memory.of(memory, held)
    return library


@dataclass(frozen=True)
class Work:
    """What the engine is to compute, with drawn weights.

    Args:
        product: of a linear; None: the MLP. x: rows, float32 [B, K]. stream: packed weights. want: by the operators.
    """

    product: EngineProduct | None
    x: Array
    stream: Array
    want: Array

    @classmethod
    def linear(cls, made: Design, product: EngineProduct, x: Array, rng: np.random.Generator) -> Work:
        """A linear of these rows."""
        drawn = Linear.random(made, product, rng)
        return cls(product, x, drawn.stream, drawn.reference(x))

    @classmethod
    def mlp(cls, made: Design, x: Array, rng: np.random.Generator) -> Work:
        """The MLP of these rows."""
        layer = random_layer(made.mlp, rng)
        return cls(None, x, pack_mlp(layer, made), reference(x, layer, made.mlp))


class EngineBench:
    """The engine of a design, in a library."""

    def __init__(self, made: Design, builder: Builder, name: str) -> None:
        self.design = made
        path = builder.build(made, ENGINE, "engine.cpp", name)
        self._run = ctypes.CDLL(str(path)).fastcar_rtl_engine

    def run(self, work: Work, rows: int, memory: EngineMemory, *, held: int = 0) -> int:
        """Compare RTL, C++ and operators bit for bit; return the clocks to the last word written.

        Rows that do not compute have to stay as they were.

        Args:
            rows: bit b says whether row b computes. memory: its words under way are the RTL's own.
            held: clocks of a thousand in which the other end of a stream is not ready.
        """
        product, x = work.product, work.x
        last = product or self.design.down
        op = OP_MLP if product is None else OP_LINEAR_BIAS if product.bias else OP_LINEAR
        whole = np.zeros((len(x), 4 * float_words(x.shape[1])), np.float32)
        whole[:, : x.shape[1]] = x
        results = [np.full((len(x), 4 * float_words(last.channels)), 7, np.float32) for _ in range(2)]
        buffers = [aligned(array) for array in (whole, work.stream, *results)]
        at = [ctypes.c_void_p(buffer.ctypes.data) for buffer in buffers]
        request = (rows, op, last.inputs, last.channels, last.tile, last.tiles)
        kept, clocks = _Memory.of(memory, held), ctypes.c_int64()
        done = self._run(*at[:2], *request, ctypes.byref(kept), *at[2:], ctypes.byref(clocks))
        assert done == 1, "the engine refuses the request"
        rtl, cpp = buffers[2:]
        assert_same_bits(rtl, cpp)
        computes = np.array([rows >> b & 1 for b in range(len(x))], bool)
        assert (rtl[~computes] == 7).all()
        assert_same_bits(rtl[computes, : last.channels], work.want[computes])
        return clocks.value
