"""How the graph was rewritten."""

from __future__ import annotations

from pydantic import Field

from fastcar_compile.artifact.sections.base import Section


class PipelineSection(Section):
    """What rewrote the graph.

    Args:
        passes: as text, as `fastcar opt` takes it. log: what each of them did.
        reasons: of passes, and of operators such as `fastcar.tas`: why they are in the graph.
    """

    passes: str
    log: tuple[str, ...]
    reasons: dict[str, str] = Field(default_factory=dict[str, str])

    def reason(self, made_by: str, operator: str = "") -> str:
        """Return why a pass made a node: what its operator is for, then what the pass is for."""
        known = (self.reasons.get(operator), self.reasons.get(made_by))
        return " ".join(text for text in known if text) or f"Pass {made_by} made this node."
