"""How the graph was rewritten."""

from __future__ import annotations

from fastcar_compile.artifact.sections.base import Section


class PipelineSection(Section):
    """The passes as text, as `fastcar opt` takes it, and what each of them did."""

    passes: str
    log: tuple[str, ...]
