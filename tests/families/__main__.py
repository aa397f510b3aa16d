"""`PYTHONPATH=tests python -m families` writes docs/reference/models.md."""

from .document import write

write()
