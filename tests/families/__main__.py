"""`python -m tests.families` writes docs/reference/models.md."""

from .document import write

write()
