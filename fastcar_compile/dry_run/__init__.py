"""What `compile` would do, without doing it: a typed report of everything that is decided before code generation."""

from fastcar_compile.dry_run.report import DryRun

__all__ = ["DryRun"]
