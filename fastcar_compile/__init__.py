"""fastcar_compile: an ahead-of-time compiler for autoregressive video decoders (FastCar, arXiv 2505.14709).

Importing this package loads nothing else. Each name loads what it needs when it is first used; opening an artifact and
decoding on cpu need neither torch nor the compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastcar_compile.artifact.cache import Cache as Cache
    from fastcar_compile.artifact.thresholds import Thresholds as Thresholds
    from fastcar_compile.artifact.trust import sign as sign
    from fastcar_compile.artifact.trust import verify_signature as verify_signature
    from fastcar_compile.compiler import compile as compile
    from fastcar_compile.config import CompileConfig as CompileConfig
    from fastcar_compile.config import Jacobi as Jacobi
    from fastcar_compile.config import ReplayConfig as ReplayConfig
    from fastcar_compile.config import SparseAttention as SparseAttention
    from fastcar_compile.config.targets import Target as Target
    from fastcar_compile.config.targets import available_targets as available_targets
    from fastcar_compile.config.targets import load_target as load_target
    from fastcar_compile.errors import ArtifactError as ArtifactError
    from fastcar_compile.errors import BackendError as BackendError
    from fastcar_compile.errors import CompileError as CompileError
    from fastcar_compile.errors import FastcarError as FastcarError
    from fastcar_compile.errors import InputError as InputError
    from fastcar_compile.errors import InternalError as InternalError
    from fastcar_compile.errors import SignatureError as SignatureError
    from fastcar_compile.errors import TargetError as TargetError
    from fastcar_compile.errors import UserError as UserError
    from fastcar_compile.frontend.adapt import adapt as adapt
    from fastcar_compile.gates.draft import Draft as Draft
    from fastcar_compile.report.comparison import diff as diff
    from fastcar_compile.report.environment import doctor as doctor
    from fastcar_compile.report.page.page import inspect as inspect
    from fastcar_compile.runtime.batcher import Batcher as Batcher
    from fastcar_compile.runtime.compiled import Artifact as Artifact
    from fastcar_compile.runtime.compiled import load as load
    from fastcar_compile.runtime.generation import TransformersDecoder as TransformersDecoder
    from fastcar_compile.runtime.sampling import Sampling as Sampling
    from fastcar_compile.runtime.session import Session as Session
    from fastcar_compile.runtime.video import VideoPipeline as VideoPipeline
    from fastcar_compile.tune.calibrate import calibrate as calibrate
    from fastcar_compile.tune.training.draft import fit_draft as fit_draft
    from fastcar_compile.tune.training.train import TrainedGate as TrainedGate
    from fastcar_compile.tune.training.train import train_gate as train_gate
    from fastcar_compile.tune.training.train import tune_decoder as tune_decoder

__version__: str
"""Version of the installed distribution."""

_MODULES = {
    "artifact.cache": ("Cache",),
    "artifact.thresholds": ("Thresholds",),
    "tune.calibrate": ("calibrate",),
    "frontend.adapt": ("adapt",),
    "gates.draft": ("Draft",),
    "report.comparison": ("diff",),
    "runtime.batcher": ("Batcher",),
    "runtime.compiled": ("Artifact", "load"),
    "compiler": ("compile",),
    "config": ("CompileConfig", "Jacobi", "ReplayConfig", "SparseAttention"),
    "report.environment": ("doctor",),
    "errors": (
        *("ArtifactError", "BackendError", "CompileError", "FastcarError", "InputError", "InternalError"),
        *("SignatureError", "TargetError", "UserError"),
    ),
    "runtime.generation": ("TransformersDecoder",),
    "report.page.page": ("inspect",),
    "runtime.sampling": ("Sampling",),
    "runtime.session": ("Session",),
    "runtime.video": ("VideoPipeline",),
    "config.targets": ("Target", "available_targets", "load_target"),
    "tune.training.draft": ("fit_draft",),
    "tune.training.train": ("TrainedGate", "train_gate", "tune_decoder"),
    "artifact.trust": ("sign", "verify_signature"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}
_REMOVED = {
    "simulate": "`fastcar estimate ARTIFACT --time-line FILE`",
    "Check": "fastcar_compile.report.environment.Check",
    "DryRun": "fastcar_compile.report.dry_run.DryRun",
    "TokenStream": "fastcar_compile.runtime.streams.TokenStream",
    "TunedDecoder": "fastcar_compile.tune.training.train.TunedDecoder",
    "Video": "fastcar_compile.runtime.video.Video",
    "Wavefront": "fastcar_compile.Jacobi",
}
"""Names that this minor version still knows -> what does their work now."""

# Checkers want a literal here. They find the names among the imports above.
__all__ = sorted(_WHERE)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used (PEP 562)."""
    if name == "__version__":
        return import_module(f"{__name__}.support.packages").installed_version()
    if name in _REMOVED:
        from fastcar_compile.errors import UserError

        raise UserError(f"fastcar_compile.{name} was removed", hint=f"use {_REMOVED[name]}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastcar_compile.support.machine import collector_paused
    from fastcar_compile.support.packages import needs

    with collector_paused(), needs("train" if _WHERE[name].startswith("tune.training") else "compile"):
        value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
