"""What a step program needs of an engine and its memory."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 32
MAX_PORTS = 64

MAX_COUNT = 65535
"""Most of anything that is counted, besides channels, words of a buffer and rows of a table."""

MAX_WORDS = 1 << 30
"""Memory words of a buffer."""


@dataclass(frozen=True)
class Sizes:
    """What a program needs: words 5 to 15 of its header.

    Args:
        rows: of the batch. ports: weight ports. positions: that the key/value cache holds.
        row_words: memory words of a row on chip. constant_words: of norm weights, RoPE tables and networks.
        weight_words, key_words, value_words: of the section of one port. input_words, output_words: of all rows.
        replay_words: of chain counts, and outputs and inputs of MLPs.
    """

    rows: int
    ports: int
    positions: int
    row_words: int
    constant_words: int
    weight_words: int
    key_words: int
    value_words: int
    input_words: int
    output_words: int
    replay_words: int = 0

    def is_valid(self) -> bool:
        """Return whether every size is in the format's range."""
        small = 1 <= self.rows <= MAX_ROWS and 1 <= self.ports <= MAX_PORTS and 1 <= self.row_words <= MAX_COUNT
        words = (self.constant_words, self.weight_words, self.key_words, self.value_words, self.input_words)
        return (
            small
            and 1 <= self.positions <= MAX_COUNT
            and max(*words, self.output_words, self.replay_words) <= MAX_WORDS
        )
