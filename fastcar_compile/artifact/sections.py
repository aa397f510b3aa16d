"""The typed sections of a manifest: the decoder, the libraries, the models, the passes, and the accelerator."""

from math import prod
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fastcar_compile.config.formats import DTYPES, DType
from fastcar_compile.ir.types import REPLAY_ROLES, DecoderConfig, LayerSite, StateRole


class Part(BaseModel):
    """Something inside a section."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(Part):
    """A part of the manifest with a version of its own. A change of a section's fields raises `VERSION`."""

    VERSION: ClassVar[int] = 1
    version: int = 0

    @model_validator(mode="before")
    @classmethod
    def _has_this_version(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, Any]", data)
        found = fields.get("version", cls.VERSION)
        if found != cls.VERSION:
            raise ValueError(f"version {found}; this fastcar_compile reads version {cls.VERSION}")
        return {**fields, "version": found}


class State(Part):
    """One state tensor: an input and an output of the graph under the same name. It starts at zero.

    A state of the context is an input only.

    Args:
        dtype: a name of `formats.dtypes`.
        sinks: of a ring cache, the first positions, which it keeps for ever; None: it is no ring.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: StateRole
    layer: int
    sinks: int | None = None

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"there is no element type {dtype!r}")
        return dtype

    @property
    def format(self) -> DType:
        """The element type."""
        return DTYPES[self.dtype]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What sorts states; equal where tokens overwrite the same part of them."""
        return self.role in REPLAY_ROLES, -1 if self.sinks is None else self.sinks, self.shape, self.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.format.itemsize * prod(self.shape)


class DecoderSection(Section):
    """The decoder as a session sees it.

    Args:
        outputs: names of the decode step's results, in order. prefill_outputs: the same of the prefill chunk.
        context_outputs: the states that the context graph makes, in order.
        weight_bytes: bytes of all parameters.
    """

    config: DecoderConfig
    state: tuple[State, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    prefill_outputs: tuple[str, ...]
    context_outputs: tuple[str, ...] = ()
    weight_bytes: int

    def state_bytes(self, layer: int | None = None) -> dict[str, int]:
        """Return the bytes of the states by their roles; layer: of this layer only."""
        sizes = dict[str, int]()
        for state in self.state:
            if layer in (None, state.layer):
                sizes[str(state.role)] = sizes.get(str(state.role), 0) + state.nbytes
        return sizes

    def token_bytes(self) -> int:
        """Return the bytes that a decoded token of every video overwrites: what a session keeps to take it back."""
        rings = (s for s in self.state if s.sinks is not None)
        replay = (s for s in self.state if s.role in REPLAY_ROLES)
        return sum(s.nbytes // s.shape[2] for s in rings) + sum(s.nbytes // s.shape[0] for s in replay)


class LayersSection(Section):
    """Every layer, in order."""

    layers: tuple[LayerSite, ...]

    @property
    def thresholds(self) -> list[float | None]:
        """The compiled threshold of every layer; None: the layer never replays."""
        return [None if layer.replay is None else layer.replay.threshold for layer in self.layers]

    @property
    def gates(self) -> list[str | None]:
        """The gate of every layer; None: the layer never replays."""
        return [None if layer.replay is None else layer.replay.gate for layer in self.layers]

    @property
    def gate(self) -> str | None:
        """The gate of the layers that may replay; None: none may."""
        return next(filter(None, self.gates), None)


class ProgramPart(Part):
    """One compiled program.

    Args:
        function: its name in the library. check: name of the function that only checks the same arguments.
        inputs, params, outputs: names of the first arguments, of the next arguments, and of the results, in order.
    """

    function: str
    check: str
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]


class ProgramsPart(Part):
    """The programs of one CPU.

    Args:
        library: the file with the programs: a shared library, or an archive of its object files.
        prefill: None: prompts go through `decode`. offload: the decode step that calls the accelerator.
        context: makes the states that cross-attention reads; None: the decoder has no cross-attention.
        embed: makes the rows of tokens for an accelerator that runs whole steps; None: no accelerator does so, or rows
            are the decoder's input.
        draw: draws tokens of the logits of `decode`; None: of an earlier version.
    """

    library: str
    decode: ProgramPart
    prefill: ProgramPart | None = None
    offload: ProgramPart | None = None
    context: ProgramPart | None = None
    embed: ProgramPart | None = None
    draw: ProgramPart | None = None

    def named(self) -> dict[str, ProgramPart]:
        """Return the programs that exist, by name."""
        return {name: program for name, program in self if isinstance(program, ProgramPart)}


class VariantPart(Part):
    """The library for one instruction set. `flags`: flags that /proc/cpuinfo must list."""

    instruction_set: str
    triple: str
    flags: tuple[str, ...]
    programs: ProgramsPart


class BoardPart(Part):
    """Programs for the board's CPU.

    Args:
        cpu: LLVM name. compiler: the linker that the build looked for.
        linked: the programs are a library; else they are an archive of object files.
    """

    triple: str
    cpu: str
    instruction_set: str
    compiler: str
    linked: bool
    programs: ProgramsPart


class HostSection(Section):
    """Every library. `variants`: the best library of each architecture first. `board`: None for a CPU target."""

    VERSION: ClassVar[int] = 2

    variants: tuple[VariantPart, ...]
    board: BoardPart | None


class OnnxSection(Section):
    """The files. An updated state is the output `<state>_out`: ONNX inputs and outputs share one name space.

    Args:
        model: the decode step.
        context: the model that makes the states that cross-attention reads; None: the decoder has no cross-attention.
    """

    model: str
    context: str | None = None

    @staticmethod
    def output_name(state: str) -> str:
        """Return the name of a state's updated value."""
        return f"{state}_out"


class PipelineSection(Section):
    """The passes that rewrote the graph.

    Args:
        passes: the pipeline as text, as `fastcar opt` takes it. log: a line about each pass.
        reasons: name of a pass, or of an operator such as `fastcar.tas` -> why it is in the graph.
    """

    passes: str
    log: tuple[str, ...]
    reasons: dict[str, str] = Field(default_factory=dict[str, str])

    def reason(self, made_by: str, operator: str = "") -> str:
        """Return why a pass made a node: the purpose of its operator, then the purpose of the pass."""
        known = (self.reasons.get(operator), self.reasons.get(made_by))
        return " ".join(text for text in known if text) or f"Pass {made_by} made this node."
