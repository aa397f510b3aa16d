"""What the emitter tells the backend. The device side imports this, and nothing of the compiler."""

from fastcar_compile.artifact.sections import Section


class RecorderSection(Section):
    """The columns of one line of the record, one per decision of a layer."""

    columns: tuple[str, ...]
