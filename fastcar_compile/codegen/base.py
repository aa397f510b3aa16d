"""What a backend's compile side is: an emitter, which writes files and returns a typed section of the manifest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastcar_compile.artifact.sections import Section
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.plan import BuildPlan
from fastcar_compile.codegen.tvm.isa import InstructionSet
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.tensor_files import TensorPlacement
from fastcar_compile.support.packages import Registry

Progress = Callable[[str], None]
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class EmitContext:
    """What an emitter is given besides the program.

    Args:
        writer: takes files.
        plan: everything that was decided of the build. variants: instruction sets for this CPU's libraries.
        places: where each parameter's bytes are in the weight files.
        say: reports a stage.
        sections: what the emitters before this one returned, by name.
    """

    writer: ArtifactWriter
    plan: BuildPlan
    variants: Sequence[InstructionSet]
    places: Mapping[str, TensorPlacement]
    say: Progress
    sections: Mapping[str, Section]

    def section(self, kind: type[S]) -> S | None:
        """Return the section of this type that an earlier emitter returned; None: there is none."""
        return next((s for s in self.sections.values() if isinstance(s, kind)), None)


class Emitter(Protocol):
    """Writes one backend's files. A program is not changed."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> Section | None:
        """Write the files; return what the manifest says of them, or None where the backend has nothing to add.

        Raises:
            CompileError: the backend cannot run this program.
        """
        ...


EMITTERS = Registry(
    "emitter",
    "fastcar_compile.emitters",
    {
        "onnx": "fastcar_compile.codegen.onnx.export:OnnxEmitter",
        "hls": "fastcar_compile.codegen.hls.emit:HlsEmitter",
        "tvm": "fastcar_compile.codegen.tvm.emit:TvmEmitter",
        "webgpu": "fastcar_compile.codegen.tvm.gpu.emit:GpuEmitter",
        "host-program": "fastcar_compile.codegen.hls.host_program:HostProgramEmitter",
    },
    CompileError,
)
"""In the order in which they run; those of other packages run last, by name."""
