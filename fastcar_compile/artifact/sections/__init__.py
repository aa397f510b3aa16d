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
from fastcar_compile.artifact.sections.decoder import (
    AttentionPart,
    DecoderSection,
    LayerPart,
    LayersSection,
    MlpPart,
    Part,
    ReplayPart,
    Section,
    State,
)

__all__ = [
    "AcceleratorSection",
    "ArgumentPart",
    "AttentionPart",
    "BoardPart",
    "DecoderSection",
    "DesignPart",
    "HostSection",
    "KernelPart",
    "LayerPart",
    "LayersSection",
    "MlpPart",
    "OnnxSection",
    "Part",
    "PipelineSection",
    "ProductPart",
    "ProgramPart",
    "ProgramsPart",
    "ReplayPart",
    "Section",
    "State",
    "VariantPart",
]
