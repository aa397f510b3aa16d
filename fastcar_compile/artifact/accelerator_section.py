"""The manifest's section of the accelerator: kernels as a host calls them, the design behind them, the controller."""

from typing import ClassVar, Literal

from pydantic import Field

from fastcar_compile.artifact.engine import BoardBudget, DraftProducts, EngineKind, EngineProduct, MlpSpec, Usage
from fastcar_compile.artifact.sections import Part, Section
from fastcar_compile.errors import InternalError


class DesignPart(Part):
    """The engine: the compute kernel of a decoder.

    Args:
        spec: the MLP that all layers share. gate_up, down: its two products.
        linears: name of every other call -> its product, in call order. drafts: the same of drafts.
        ports: logical weight ports of 128 bits. axi_words: weight ports that one AXI port carries, word by word.
        passes: passes over a tile when every row computes.
        group: query heads that a kernel of whole steps multiplies in parallel; 0: the kernel runs no whole steps.
        engine: where the products are.
        stream_bytes: bytes of one layer's MLP. linear_stream_bytes: bytes of each linear call.
        usage_estimate, cycles_estimate, linear_cycles_estimate: not synthesised; clocks of one call.
    """

    spec: MlpSpec
    budget: BoardBudget
    ports: int
    gate_up: EngineProduct
    down: EngineProduct
    linears: dict[str, EngineProduct]
    tiles_in_uram: bool
    axi_words: int
    lanes: int
    passes: int
    stream_bytes: int
    linear_stream_bytes: dict[str, int]
    usage_estimate: Usage
    cycles_estimate: int
    linear_cycles_estimate: dict[str, int]
    group: int = 0
    share: int = 1
    drafts: dict[str, DraftProducts] = Field(default_factory=dict[str, DraftProducts])
    engine: EngineKind = "hls"


class ExplorationPart(Part):
    """The reason why the exploration found no faster design."""

    seconds_per_step: float
    bound_by: str
    tried: int
    rejected: int
    faster: tuple[str, ...]


class ArgumentPart(Part):
    """One argument of a kernel, in the order of its signature. bytes: size of the buffer or of the scalar."""

    name: str
    kind: Literal["in", "out", "scalar"]
    bytes: int


class KernelPart(Part):
    """A kernel as the host calls it. streams: names of its streams from and to another kernel, behind the arguments."""

    name: str
    arguments: tuple[ArgumentPart, ...]
    streams: tuple[str, ...] = ()

    def index(self, argument: str) -> int:
        """Return the position of an argument in the signature.

        Raises:
            InternalError: the kernel has no argument of this name.
        """
        names = [a.name for a in self.arguments]
        if argument not in names:
            raise InternalError(f"kernel {self.name} has no argument {argument}, only {', '.join(names)}")
        return names.index(argument)

    def weights(self) -> list[str]:
        """Return the arguments that take a section of a weight stream each, in the order of the sections."""
        return [a.name for a in self.arguments if a.name.startswith("weights_")]

    def caches(self) -> list[str]:
        """Return the arguments that hold keys and values, in the order of the weight ports."""
        return [a.name for a in self.arguments if a.name.startswith("cache_")]


class LimitsPart(Part):
    """The limits of the controller.

    Cores, rows, 32-bit words of a table, 128-bit words of a row of q and of the key, or of the MLP's input; hidden
    units of a network; query heads that have a weight each.
    """

    cores: int
    rows: int
    table_words: int
    query_words: int
    key_words: int
    gate: str
    units: int
    heads: int


class ControllerPart(Part):
    """The score unit and DRS controller.

    gated_layers: layers whose gate it decides. refresh_period: forwards from one frame without replay to the next.
    """

    table_version: int
    gate: str
    gated_layers: tuple[int, ...]
    couple_cfg: bool
    max_chain: int | None
    limits: LimitsPart
    usage_estimate: Usage
    cycles_estimate: int
    refresh_period: int | None = None


class LinearCallPart(Part):
    """Linears that share their input, as one call. layer: None outside of the layers."""

    name: str
    layer: int | None
    paths: tuple[str, ...]
    inputs: int
    channels: tuple[int, ...]


class HostLinearPart(Part):
    """A linear that stays on the host, and why."""

    path: str
    layer: int | None
    reason: str


class StepPart(Part):
    """A whole decode step on the accelerator.

    Args:
        instructions: number of instructions of the program.
        states: name of a state -> its first memory word: keys and values in a port's section of the caches, other
            states in the replay buffer (docs/reference/artifact.md).
    """

    instructions: int
    states: dict[str, int]


class AcceleratorSection(Section):
    """Everything that a host needs to call the kernels.

    Args:
        weights: file of the weight streams. table: the control table with its program.
        kernels: what a host starts: the kernel that executes programs, then the engine where it is a kernel of its own.
        linears, on_host: the calls outside of the MLPs, and with offload="linears" the linears that the host keeps.
        step: with offload="all", the whole decode step.
    """

    VERSION: ClassVar[int] = 4

    offload: Literal["mlp", "linears", "all"]
    weights: str
    table: str
    controller: ControllerPart
    design: DesignPart
    exploration: ExplorationPart
    kernels: tuple[KernelPart, ...]
    linears: tuple[LinearCallPart, ...] = ()
    on_host: tuple[HostLinearPart, ...] = ()
    step: StepPart | None = None
