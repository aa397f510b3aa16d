"""A gate of another package, without installing one: the host decides it, whatever its score is."""

import pytest

from fastcar_compile.gates import GATES
from fastcar_compile.gates.input_delta import InputDeltaGate


class ForeignGate(InputDeltaGate):
    """The score of a gate that the controller has."""

    name = "foreign"


def register(patch: pytest.MonkeyPatch) -> str:
    """Make it known, and return its name."""
    patch.setitem(GATES._registered, ForeignGate.name, ForeignGate)
    return ForeignGate.name
