"""Backends by name; each backend is a module or a folder here, or an entry point of another package."""

from fastcar_compile.runtime.backends.base import BACKENDS, Array, BackendOptions, OpenStepper, Stepper, StepResult

__all__ = ["BACKENDS", "Array", "BackendOptions", "OpenStepper", "StepResult", "Stepper"]
