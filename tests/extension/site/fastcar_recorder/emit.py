"""Compile side: name the columns after the decoder's layers, and write them for people too."""

from fastcar_compile.codegen.emit import EmitContext
from fastcar_compile.ir.program import DecoderProgram
from fastcar_recorder.section import RecorderSection


class RecorderEmitter:
    """Writes recorder/columns.txt."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> RecorderSection:
        """Write the file; see Emitter.emit."""
        columns = tuple(site.module_path for site in program.sites)
        context.writer.write_text("recorder/columns.txt", "\n".join(columns) + "\n")
        return RecorderSection(columns=columns)
