"""The ONNX part of an artifact."""

from __future__ import annotations

from fastcar_compile.artifact.layout import (
    ONNX_CONTEXT_EXTERNAL,
    ONNX_CONTEXT_INLINE,
    ONNX_EXTERNAL,
    ONNX_INLINE,
)
from fastcar_compile.artifact.sections import OnnxSection
from fastcar_compile.codegen.base import EmitContext
from fastcar_compile.extras import needs
from fastcar_compile.ir.program import DecoderProgram

EXTERNAL_DATA_FROM = 1 << 26
"""Bytes of parameters from which they stay in the weight files; below, the model stands alone."""


class OnnxEmitter:
    """Writes the decode step as one ONNX model, and with cross-attention the context graph as a second one."""

    def emit(self, program: DecoderProgram, context: EmitContext) -> OnnxSection | None:
        """Write the model; see Emitter.emit. Exact numerics have none: onnxruntime rounds linears in its own way."""
        if context.options.numerics == "exact":
            return None
        context.say("exporting to ONNX")
        with needs("compile"):  # not imported before, because builds without a model need none of its packages
            from fastcar_compile.codegen.onnx.export import export_onnx

        # A large model reads its weights from the files of the artifact, so they are stored once.
        external = program.params.nbytes() >= EXTERNAL_DATA_FROM
        model = ONNX_EXTERNAL if external else ONNX_INLINE
        places = context.places if external else None
        export_onnx(program, context.writer.file(model), places)
        if program.context is None:
            return OnnxSection(model=model)
        second = ONNX_CONTEXT_EXTERNAL if external else ONNX_CONTEXT_INLINE
        export_onnx(program, context.writer.file(second), places, context=True)
        return OnnxSection(model=model, context=second)
