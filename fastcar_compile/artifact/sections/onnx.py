"""The ONNX model of the decode step."""

from __future__ import annotations

from fastcar_compile.artifact.sections.base import Section


class OnnxSection(Section):
    """The model's file. An updated state is the output `<state>_out`: ONNX inputs and outputs share one name space."""

    model: str

    @staticmethod
    def output_name(state: str) -> str:
        """Return the name of a state's updated value."""
        return f"{state}_out"
