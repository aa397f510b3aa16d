"""The typed sections of a manifest, one file each."""

from fastcar_compile.artifact.sections.accelerator import (
    AcceleratorSection,
    ArgumentPart,
    DesignPart,
    KernelPart,
    ProductPart,
)
from fastcar_compile.artifact.sections.build import (
    BoardPart,
    HostSection,
    OnnxSection,
    PipelineSection,
    ProgramPart,
    ProgramsPart,
    VariantPart,
)
from fastcar_compile.artifact.sections.decoder import DecoderSection, LayersSection, Part, Section, State

__all__ = [
    "AcceleratorSection",
    "ArgumentPart",
    "BoardPart",
    "DecoderSection",
    "DesignPart",
    "HostSection",
    "KernelPart",
    "LayersSection",
    "OnnxSection",
    "Part",
    "PipelineSection",
    "ProductPart",
    "ProgramPart",
    "ProgramsPart",
    "Section",
    "State",
    "VariantPart",
]
