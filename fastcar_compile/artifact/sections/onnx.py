"""The ONNX models."""

from __future__ import annotations

from fastcar_compile.artifact.sections.base import Section


class OnnxSection(Section):
    """The files. An updated state is the output `<state>_out`: ONNX inputs and outputs share one name space.

    Args:
        model: the decode step.
        context: what makes the states that cross-attention reads; None: there is no cross-attention.
    """

    model: str
    context: str | None = None

    @staticmethod
    def output_name(state: str) -> str:
        """Return the name of a state's updated value."""
        return f"{state}_out"
