"""fastcar_compile: an ahead-of-time compiler for autoregressive video decoders (FastCar, arXiv 2505.14709)."""

from fastcar_compile.calibration import Thresholds, calibrate
from fastcar_compile.compiled import Artifact, load
from fastcar_compile.compiler import compile
from fastcar_compile.config import CompileConfig, ReplayConfig, SparseAttention
from fastcar_compile.errors import (
    ArtifactError,
    BackendError,
    CompileError,
    FastcarError,
    InputError,
    InternalError,
    TargetError,
    UserError,
)
from fastcar_compile.runtime.session import Session
from fastcar_compile.targets import Target, available_targets, load_target
from fastcar_compile.training.train import TrainedGate, train_gate
from fastcar_compile.training.tune import TunedDecoder, tune_decoder

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "ArtifactError",
    "BackendError",
    "CompileConfig",
    "CompileError",
    "FastcarError",
    "InputError",
    "InternalError",
    "ReplayConfig",
    "Session",
    "SparseAttention",
    "Target",
    "TargetError",
    "Thresholds",
    "TrainedGate",
    "TunedDecoder",
    "UserError",
    "available_targets",
    "calibrate",
    "compile",
    "load",
    "load_target",
    "train_gate",
    "tune_decoder",
]
