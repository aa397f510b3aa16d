"""Libraries for CPUs: one per instruction set, and one for the board's own CPU."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fastcar_compile.artifact.sections.decoder import Part, Section


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
    """

    library: str
    decode: ProgramPart
    prefill: ProgramPart | None = None
    offload: ProgramPart | None = None
    context: ProgramPart | None = None
    embed: ProgramPart | None = None

    def named(self) -> dict[str, ProgramPart]:
        """Return the programs that exist, by name."""
        found = {
            "decode": self.decode,
            "prefill": self.prefill,
            "offload": self.offload,
            "context": self.context,
            "embed": self.embed,
        }
        return {name: program for name, program in found.items() if program is not None}


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


# The ONNX models.


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


# How the graph was rewritten.


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
