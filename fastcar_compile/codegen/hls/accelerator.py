"""What the accelerator computes of a decoder, and on which engine: everything that is decided before files are written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from fastcar_compile.artifact.engine import MlpSpec
from fastcar_compile.codegen.hls.control import control_table, network_streams, networks_of
from fastcar_compile.codegen.hls.control_table.table import DrsTable
from fastcar_compile.codegen.hls.decode_step import DecodeStep, decode_step
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import Exploration, KernelSpec, explore
from fastcar_compile.codegen.hls.design.memory import Footprint, capacity, held, require_fit
from fastcar_compile.codegen.hls.design.spec import LinearSpec, StepSpec, check_mlp
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import KernelInterface, kernel_interfaces
from fastcar_compile.codegen.hls.step_program.builder import short_program
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.config import CompileConfig
from fastcar_compile.config.formats import quant_format
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import node_named
from fastcar_compile.ir.types import LayerSite, StateRole
from fastcar_compile.passes.offload import HostLinear, LinearCall, linear_calls


@dataclass(frozen=True)
class Offloaded:
    """What the accelerator computes of a decode step beside the MLPs, whatever engine it has.

    Args:
        calls: of linears outside of the MLPs. kept: the linears that the host keeps, where linears are offloaded.
        step: with offload="all", what a decode step is made of.
    """

    calls: Sequence[LinearCall] = ()
    kept: Sequence[HostLinear] = ()
    step: DecodeStep | None = None


@dataclass(frozen=True, kw_only=True)
class Accelerator(Offloaded):
    """The engine and its work.

    Args:
        found: the design, and why it is no faster.
        table: the DRS control table.
        program: a whole decode step; without `step` short programs.
    """

    found: Exploration
    table: DrsTable
    program: StepProgram

    @property
    def design(self) -> Design:
        """The engine."""
        return self.found.design

    @property
    def whole(self) -> StepProgram | None:
        """The program of a whole decode step; None: the host sequences short programs."""
        return None if self.step is None else self.program

    @property
    def kernel_design(self) -> StepDesign:
        """What the kernel executes."""
        sides = () if self.step is None else (self.design.group, self.design.share)
        return StepDesign.of(self.program, *sides)

    @property
    def kernels(self) -> tuple[KernelInterface, ...]:
        """The kernels as a host calls them."""
        return kernel_interfaces(self.design, self.kernel_design, self.table)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the weight streams, in the order of a section."""
        if self.step is not None:
            return self.step.streams
        return (*(f"layer_{n}" for n in range(self.design.mlp.layers)), *(call.name for call in self.calls))

    def constants(self, program: DecoderProgram) -> NDArray[Any]:
        """Return what the program reads besides weights and caches, float32 words: of short programs the networks."""
        if self.step is not None:
            return self.step.constants(program)
        return network_streams(program)


def offloaded(program: DecoderProgram, offload: str) -> Offloaded:
    """Return what the accelerator computes of a rewritten program.

    Raises:
        CompileError: there is no linear to offload, or everything that a step program cannot express.
    """
    if offload == "mlp":
        return Offloaded()
    # The host looks up the embedding; a linear in front of the first layer belongs to it.
    before = node_named(program.graph_module.graph, program.sites[0].entry) if offload == "all" else None
    calls, kept = linear_calls(program, before=before)
    if not calls:
        reasons = "; ".join(f"{k.path}: {k.reason}" for k in kept) or "the decode step has none outside of the MLPs"
        raise CompileError(f"offload={offload!r} finds no linear to offload ({reasons})", hint="use offload='mlp'")
    return Offloaded(calls, kept, decode_step(program, calls, kept) if offload == "all" else None)


def choose_accelerator(program: DecoderProgram, config: CompileConfig, board: Target, work: Offloaded) -> Accelerator:
    """Return the plan for a board, whether or not the board's memory holds the decoder.

    Where it does, the banks behind every weight port hold that port's part.

    Raises:
        CompileError: no kernel fits the fabric and the banks, there is none for a shape, the layers differ, a weight
            of an MLP is computed in the graph, or an engine in RTL would have to compute drafts.
    """
    _check_equal(program.sites)
    _check_quantised(program, config)
    linears = [LinearSpec(c.name, c.inputs, sum(c.channels), c.biased) for c in work.calls]
    step = None if work.step is None else _step_spec(program, work.step)
    mlp = _mlp_spec(program, config)
    check_mlp(mlp)
    table = control_table(program, config, 1)
    drafts = () if work.step is None else work.step.drafts
    if drafts and config.engine == "rtl":
        what = "engine='rtl' has no drafts: they exist in the C++ of the engine only"
        raise CompileError(what, hint="leave engine out, or give offload='linears', where the host computes drafts")
    wanted = KernelSpec(mlp, table.limits, linears, step, drafts, config.engine)
    # A memory that is too small for the decoder is reported elsewhere: its banks would refuse every design.
    found = explore(wanted, board, banks=footprint_of(program, config, board).total <= capacity(board))
    table = replace(table, cores=found.design.mlp.cores)
    if work.step is None:
        units = [len(own.b1) for _, own in sorted(networks_of(program).items())]
        ran = short_program(found.design, table, units)
    else:
        ran = work.step.program(found.design)
    return Accelerator(work.calls, work.kept, work.step, found=found, table=table, program=ran)


def require_memory(program: DecoderProgram, config: CompileConfig, board: Target) -> None:
    """Raise CompileError where the board's memory does not hold the decoder."""
    positions = max(s.shape[2] for s in program.state if s.role is StateRole.KEY_CACHE)
    require_fit(footprint_of(program, config, board), board, quant=config.quant, positions=positions)


def footprint_of(program: DecoderProgram, config: CompileConfig, board: Target) -> Footprint:
    """Return what the weight memories of a board hold of a program."""
    return held(Footprint.of(program.params.nbytes(), program.state), board, attends=config.offload == "all")


def _step_spec(program: DecoderProgram, step: DecodeStep) -> StepSpec:
    """Return what the kernel of whole steps has beside MLPs and linears: the attention of the first layer."""
    own = program.sites[0].attention
    shared = program.config.rows or 1
    return StepSpec(own.num_heads, own.num_kv_heads, own.head_dim, own.cache_rows, step.norm.layer, shared)


def _mlp_spec(program: DecoderProgram, config: CompileConfig) -> MlpSpec:
    """Return the MLP that all layers share; the exploration chooses the cores."""
    mlps = [site.mlp for site in program.sites]
    mlp = mlps[0]
    up_bias = any(bias is not None for m in mlps for bias in m.biases[:-1])
    biases = {"up_bias": up_bias, "down_bias": any(m.biases[-1] is not None for m in mlps)}
    sizes = (mlp.hidden, mlp.intermediate, program.config.decode_rows, len(mlps))
    return MlpSpec(*sizes, cores=1, activation=mlp.activation, gated=mlp.gated, quant=config.quant, **biases)


def _check_equal(sites: Sequence[LayerSite]) -> None:
    """Raise CompileError when layers differ: they share one kernel."""

    def shape(site: LayerSite) -> str:
        kind = f"{'gated' if site.mlp.gated else 'plain'} {site.mlp.activation}"
        return f"layer {site.layer}: {kind}, {site.mlp.hidden} / {site.mlp.intermediate}"

    different = [s for s in sites if shape(s).partition(":")[2] != shape(sites[0]).partition(":")[2]]
    if different:
        what = f"the accelerator has one MLP kernel, but the layers differ: {shape(sites[0])}; {shape(different[0])}"
        raise CompileError(what, where=different[0].source, hint="compile for a CPU target")


def _check_quantised(program: DecoderProgram, config: CompileConfig) -> None:
    """Raise CompileError where a linear of an MLP has no quantised weight to pack."""
    suffix, params = quant_format(config.quant).suffix, program.params
    for site in program.sites:
        weights = zip(site.mlp.linears, site.mlp.weights, strict=True)
        lacking = [node for node, name in weights if f"{name}_{suffix}" not in params]
        if lacking:
            raise CompileError(
                f"the accelerator cannot compute the MLP of layer {site.layer}: the weight of {', '.join(lacking)} is "
                "computed in the graph, so it cannot be packed at compile time",
                where=site.source,
                hint="make the weight a parameter of the model, or compile for a CPU target",
            )
