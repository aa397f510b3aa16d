"""What a kernel of whole decode steps has besides its array: rows, query heads and positions on chip."""

from __future__ import annotations

from dataclasses import dataclass

from fastcar_compile.step.cache_layout import BLOCK
from fastcar_compile.step.instructions import INSTRUCTION_WORDS, LANES, Append, Attend, Decide
from fastcar_compile.step.program import HEADER_WORDS, StepProgram
from fastcar_compile.step.sizes import Sizes


@dataclass(frozen=True)
class StepDesign:
    """The kernel that holds a step program and no more; a program that needs more is refused.

    Args:
        group: query heads that attention multiplies side by side; those of a key head come in runs of so many.
    """

    program: StepProgram
    group: int

    @classmethod
    def of(cls, program: StepProgram, group: int | None = None) -> StepDesign:
        """Return the kernel of a program.

        Args:
            group: see the class; None: all query heads of a key head.
        """
        shared = [i.heads // i.key_heads for i in program.instructions if isinstance(i, Attend)]
        most = max(shared, default=1)
        return cls(program, most if group is None else min(group, most))

    @property
    def sizes(self) -> Sizes:
        """Of memory, and of the rows on chip."""
        return self.program.sizes

    @property
    def blocks(self) -> int:
        """Blocks of 32 elements of the longest head."""
        found = (i.blocks for i in self.program.instructions if isinstance(i, Append | Attend | Decide))
        return max(found, default=1)

    @property
    def instructions(self) -> int:
        """Instructions of a program."""
        return len(self.program.instructions)

    @property
    def layers(self) -> int:
        """Layers that the report has room for: up to the last one that decides."""
        return 1 + max((i.layer for i in self.program.instructions if isinstance(i, Decide)), default=0)

    @property
    def positions(self) -> int:
        """Positions of a head whose logits are on chip: whole tiles of values."""
        return -(-self.sizes.positions // BLOCK) * BLOCK

    @property
    def program_words(self) -> int:
        """Memory words of the longest program."""
        return (HEADER_WORDS + self.instructions * INSTRUCTION_WORDS) // LANES

    @property
    def cache_words(self) -> int:
        """Memory words of keys and values on one weight port."""
        return self.sizes.key_words + self.sizes.value_words
