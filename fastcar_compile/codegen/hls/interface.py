"""The typed interface of a kernel: signature, pragmas, connections and what the host fills all come from it."""

from dataclasses import dataclass, replace
from typing import Literal

from fastcar_compile.artifact.accelerator_section import ArgumentPart, KernelPart
from fastcar_compile.codegen.hls.control_table.simulator import RESULT_WORDS
from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD, DrsTable
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.design.usage import READS, WRITES
from fastcar_compile.codegen.hls.step_sample import sample_program

WORD = "fastcar::word_t"
WEIGHT_TYPES = {1: WORD, 2: "fastcar::beat2_t", 4: "fastcar::beat4_t"}
"""Element type of an AXI port that carries 1, 2 or 4 weight ports."""

TYPE_BYTES = {
    "fastcar::word_t": 16,
    "fastcar::beat2_t": 32,
    "fastcar::beat4_t": 64,
    "uint32_t": 4,
}
"""Bytes of the element types that kernels take."""


@dataclass(frozen=True)
class KernelPort:
    """One argument of a kernel.

    Args:
        ctype: element type (memory, stream) or type (scalar) in C++.
        mode: "m_axi" for memory, "s_axilite" for a scalar, "axis" for a stream between kernels, which no host fills.
        bundle: the AXI port that a memory argument uses.
        depth: elements of the buffer.
        writable: whether the kernel writes this memory or stream.
        mapped: elements that C/RTL co-simulation maps, where the test bench has a smaller buffer; 0: all.
    """

    name: str
    ctype: str
    mode: Literal["m_axi", "s_axilite", "axis"] = "s_axilite"
    bundle: str = "control"
    depth: int = 0
    writable: bool = False
    mapped: int = 0

    @property
    def burst(self) -> str:
        """Burst options of the interface pragma; arguments of one AXI port have one element type, so equal options."""
        # The pragma counts a burst in beats, and a wider port moves the same bytes in fewer of them.
        read, written = (bursts.beats(TYPE_BYTES[self.ctype]) for bursts in (READS, WRITES))
        return (
            f"max_read_burst_length={read} num_read_outstanding={READS.outstanding} "
            f"max_write_burst_length={written} num_write_outstanding={WRITES.outstanding}"
        )

    @property
    def declaration(self) -> str:
        """The argument in the C++ signature."""
        if self.mode == "s_axilite":
            return f"{self.ctype} {self.name}"
        if self.mode == "axis":
            return f"hls::stream<{self.ctype}>& {self.name}"
        return f"{'' if self.writable else 'const '}{self.ctype}* {self.name}"

    @property
    def part(self) -> ArgumentPart:
        """The argument as a host fills it."""
        size = TYPE_BYTES[self.ctype]
        if self.mode == "s_axilite":
            return ArgumentPart(name=self.name, kind="scalar", bytes=size)
        return ArgumentPart(name=self.name, kind="out" if self.writable else "in", bytes=size * self.depth)

    def pragmas(self) -> list[str]:
        """Return the interface pragmas of this argument."""
        if self.mode == "axis":
            return [f"#pragma HLS INTERFACE mode=axis port={self.name}"]
        control = f"#pragma HLS INTERFACE mode=s_axilite port={self.name} bundle=control"
        if self.mode == "s_axilite":
            return [control]
        # `offset=slave` takes the buffer's address from an AXI-Lite register, so the argument has a control pragma too.
        memory = (
            f"#pragma HLS INTERFACE mode=m_axi port={self.name} bundle={self.bundle} offset=slave "
            f"depth={self.mapped or self.depth}"
        )
        return [f"{memory} {self.burst}", control]


@dataclass(frozen=True)
class KernelInterface:
    """A kernel and its arguments, in order; streams come last."""

    name: str
    ports: tuple[KernelPort, ...]

    @property
    def part(self) -> KernelPart:
        """The kernel as a host calls it."""
        streams = self.streams()
        arguments = tuple(port.part for port in self.ports if port not in streams)
        return KernelPart(name=self.name, arguments=arguments, streams=tuple(port.name for port in streams))

    @property
    def bench(self) -> str:
        """File name of the C++ test bench that C simulation and co-simulation run."""
        return f"{self.name.removeprefix('fastcar_')}_testbench.cpp"

    def signature(self) -> str:
        """Return the C++ declaration, without `extern "C"` and semicolon.

        Streams stand as FASTCAR_STREAMS: in C simulation they are no arguments, so that a host's call is complete.
        """
        streams = self.streams()
        declared = ", ".join(port.declaration for port in self.ports if port not in streams)
        return f"void {self.name}({declared}{' FASTCAR_STREAMS' if streams else ''})"

    def pragmas(self) -> list[str]:
        """Return one or two interface pragmas per argument, and the block control."""
        lines = [line for port in self.ports for line in port.pragmas()]
        return [*lines, "#pragma HLS INTERFACE mode=s_axilite port=return bundle=control"]

    def streams(self) -> list[KernelPort]:
        """Return the streams to and from another kernel, in order."""
        return [port for port in self.ports if port.mode == "axis"]

    def memories(self) -> list[KernelPort]:
        """Return the memory arguments, in order."""
        return [port for port in self.ports if port.mode == "m_axi"]

    def bundles(self) -> list[str]:
        """Return the AXI ports of the kernel, in order of first use."""
        return list(dict.fromkeys(p.bundle for p in self.ports if p.mode == "m_axi"))


def weight_ports(design: Design) -> list[KernelPort]:
    """Return the arguments that take weight streams, one per AXI port."""
    beat, words = WEIGHT_TYPES[design.axi_words], design.max_section_words
    ports = range(design.axi_weight_ports)
    return [KernelPort(f"weights_{p}", beat, "m_axi", f"gmem_w{p}", words) for p in ports]


REPORT_LAYER_WORDS = RESULT_WORDS // FLOATS_PER_WORD
"""Memory words of the controller's answer for one layer, in the report of a step."""


SCALARS = ("op", "bytes", "entry")
"""Scalar arguments of the kernel."""


CALLS, RESULTS = "calls", "results"
"""Streams between the kernel and an engine in RTL: calls with their rows, and words of their results."""


def engine_interface(design: Design, step: StepDesign) -> KernelInterface:
    """Return the interface of the engine as a kernel of its own, in RTL (docs/explanation/accelerator.md#the-rtl)."""
    words = step.program.sizes.weight_words
    weights = [replace(port, depth=words) for port in weight_ports(design)]
    streams = [KernelPort(CALLS, WORD, "axis"), KernelPort(RESULTS, WORD, "axis", writable=True)]
    return KernelInterface("fastcar_engine", (*weights, *streams))


def kernel_interface(design: Design, step: StepDesign, table: DrsTable) -> KernelInterface:
    """Return the interface of the kernel (docs/reference/drs_table.md).

    `weights_p` takes section p of all weight streams, one after another; with an engine in RTL the streams stand there instead. `cache_p` takes that of all keys, then of all
    values. `step_program` takes the control table with its program. A kernel of short
    programs has no caches and no replay buffer. Co-simulation maps the memory of the test bench, which is one layer's.
    """
    beat, ports, sizes = WEIGHT_TYPES[design.axi_words], range(design.axi_weight_ports), step.program.sizes
    bench = sample_program(step.program, design).sizes
    cached, mapped = (of.key_words + of.value_words for of in (sizes, bench))
    program = table.words // FLOATS_PER_WORD + step.program_words
    report = 1 + REPORT_LAYER_WORDS * step.layers

    def memory(name: str, words: int, mapped: int, *, written: bool = False) -> KernelPort:
        port = "gmem_y" if written else "gmem_x"
        return KernelPort(name, WORD, "m_axi", port, max(words, 1), written, mapped=max(mapped, 1))

    def of_port(name: str, port: int, words: int, mapped: int, *, writable: bool) -> KernelPort:
        bundle = f"gmem_w{port}"
        return KernelPort(f"{name}_{port}", beat, "m_axi", bundle, words, writable, mapped=mapped)

    apart = design.engine == "rtl"
    weights = [
        of_port("weights", p, sizes.weight_words, bench.weight_words, writable=False) for p in ports if not apart
    ]
    streams = [KernelPort(CALLS, WORD, "axis", writable=True), KernelPort(RESULTS, WORD, "axis")] if apart else []
    caches = [of_port("cache", p, cached, mapped, writable=True) for p in ports if step.program.whole]
    constants = [memory("constants", sizes.constant_words, bench.constant_words)] if step.reads_constants else []
    replay = [memory("replay", sizes.replay_words, bench.replay_words, written=True)] if step.program.whole else []
    return KernelInterface(
        "fastcar_step",
        (
            *weights,
            *caches,
            *constants,
            memory("step_program", program, program),
            memory("inputs", sizes.input_words, bench.input_words),
            memory("outputs", sizes.output_words, bench.output_words, written=True),
            *replay,
            memory("step_report", report, report, written=True),
            *(KernelPort(name, "uint32_t") for name in SCALARS),
            *streams,
        ),
    )


def kernel_interfaces(design: Design, step: StepDesign, table: DrsTable) -> tuple[KernelInterface, ...]:
    """Return the interfaces of a design's kernels: the one that executes programs, and the engine where it is apart."""
    engine = [engine_interface(design, step)] if design.engine == "rtl" else []
    return (kernel_interface(design, step, table), *engine)


def probe_interface(design: Design) -> KernelInterface:
    """Return the interface of the bandwidth probe: the engine's weight ports, with the engine's bursts.

    `ports`: bit p = 1: port p reads `words` words. `result` takes a checksum per port.
    """
    weights = weight_ports(design)
    result = KernelPort("result", "uint32_t", "m_axi", "gmem_result", len(weights), writable=True)
    scalars = [KernelPort(name, "uint32_t") for name in ("words", "ports")]
    return KernelInterface("fastcar_probe", (*weights, result, *scalars))
