"""The typed sections of a manifest, one file each."""

from fastcar_compile.artifact.sections.accelerator import (
    AcceleratorSection,
    ArgumentPart,
    DesignPart,
    KernelPart,
    ProductPart,
)
from fastcar_compile.artifact.sections.base import Part, Section
from fastcar_compile.artifact.sections.decoder import (
    ATTENTION_ROLES,
    CONTEXT_ROLES,
    REPLAY_ROLES,
    ContextInput,
    DecoderConfig,
    DecoderSection,
    Ring,
    State,
    StateRole,
)
from fastcar_compile.artifact.sections.host import BoardPart, HostSection, ProgramPart, ProgramsPart, VariantPart
from fastcar_compile.artifact.sections.layers import AttentionPart, LayerPart, LayersSection, MlpPart, ReplayPart
from fastcar_compile.artifact.sections.onnx import OnnxSection
from fastcar_compile.artifact.sections.pipeline import PipelineSection

__all__ = [
    "ATTENTION_ROLES",
    "CONTEXT_ROLES",
    "REPLAY_ROLES",
    "AcceleratorSection",
    "ArgumentPart",
    "AttentionPart",
    "BoardPart",
    "ContextInput",
    "DecoderConfig",
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
    "Ring",
    "Section",
    "State",
    "StateRole",
    "VariantPart",
]
