"""The loops of a step program's instructions: how often each iterates, how long its pipeline is, what it moves.

LINEAR and MLP are the array's (`loops.py`). The vector instructions run their loops one after the other. ATTEND is a region
of processes. The closed form and the cycle model use the same loops. Depths are estimates, as in `loops.py`.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD, DrsTable
from fastcar_compile.codegen.hls.design.controller import SHIFT
from fastcar_compile.codegen.hls.design.loops import (
    ADD_CLOCKS,
    COMPARE,
    DIVIDE,
    INTEGER,
    MULTIPLY,
    READ,
    ROUND_DEPTH,
    TO_FLOAT,
    WRITE,
    Loop,
    mac_depth,
)
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, BLOCK_WORDS, LANES, CacheLayout

BLOCK_FLOATS = BLOCK // FLOATS_PER_WORD
"""128-bit words of a block of float32 values."""

ROOT_DEPTH = 25 * INTEGER
"""A square root, a bit of the result per stage (square_root of fastcar_gate_core.hpp)."""

LARGEST_DEPTH = READ + 3 * INTEGER
SQUARES_DEPTH = READ + SHIFT + MULTIPLY + 3 * INTEGER
NORM_ROOT_DEPTH = TO_FLOAT + 3 * MULTIPLY + ADD_CLOCKS + COMPARE + ROOT_DEPTH + DIVIDE
NORM_DEPTH = READ + 2 * MULTIPLY + WRITE
SUM_DEPTH = READ + SHIFT + 3 * INTEGER
MEAN_DEPTH = TO_FLOAT + 2 * MULTIPLY
ROTATE_DEPTH = READ + MULTIPLY + ADD_CLOCKS + WRITE
ADD_DEPTH = READ + ADD_CLOCKS + WRITE
DRAFT_DEPTH = READ + MULTIPLY + 3 * ADD_CLOCKS + WRITE
"""The sum of a draft and of what the gain leaves of the slot."""

MANTISSA_DEPTH = READ + MULTIPLY + ROUND_DEPTH + WRITE
EXPAND_DEPTH = READ + TO_FLOAT + MULTIPLY + WRITE
COPY_DEPTH = READ + WRITE
REPLACE_DEPTH = READ + 2 * INTEGER
POWER_DEPTH = ADD_CLOCKS + COMPARE + MULTIPLY + ROUND_DEPTH + READ + MULTIPLY + SHIFT + 2 * INTEGER
"""A numerator: the difference to the largest logit, rounded; its two powers of two, and the step between them."""

INVERSE_DEPTH = TO_FLOAT + MULTIPLY + DIVIDE + COMPARE
LIMBS_DEPTH = MULTIPLY + ROUND_DEPTH + INTEGER
WEIGH_DEPTH = READ + TO_FLOAT + MULTIPLY + 3 * INTEGER
TOTAL_DEPTH = READ + TO_FLOAT + MULTIPLY + ADD_CLOCKS + WRITE
FINISH_HEAD_DEPTH = READ + MULTIPLY + WRITE
PORTS_INTERVAL = 2
"""Clocks of an iteration that has three or four accesses to one memory, which has two ports (tests/hls/memory_ports.py)."""

TOTAL_INTERVAL = BLOCK_WORDS
"""Clocks of an iteration of the loop over totals: a sum comes of as many words of a port. One operator serves two."""

TOTAL_DISTANCE = 4
"""Least turns of that loop (TOTAL_TURNS of fastcar_step_config.hpp)."""

NETWORK_LOOPS = ("network_scores", "sums_of_units")
"""Loops of the controller that read the network of gate `learned`."""

QUADS = BLOCK // FLOATS_PER_WORD
"""Groups of four positions in a tile of values."""


def key_interval(blocks: int, ports: int) -> int:
    """Return the clocks in which a key of so many blocks comes from so many ports: operators that scale its logits serve them in turn."""
    return max(1, blocks * BLOCK_WORDS // ports)


def soften_interval(blocks: int, ports: int, lanes: int) -> int:
    """Return the same of the powers of so many query heads: one operator serves several of them."""
    return min(key_interval(blocks, ports), lanes)


def value_interval(ports: int) -> int:
    """Return the clocks in which four positions of a block of values come: the same of what weighs them."""
    return max(1, ceil(BLOCK / ports) * BLOCK_WORDS // QUADS)


@dataclass(frozen=True)
class AttendWork:
    """What ATTEND has to do.

    Args:
        rows: of the batch. key_heads: of a layer. queries: query heads of a key head. group: of them that run together.
        blocks: of 32 elements in a head. ports: weight ports. positions: rows of the cache that are filled.
        share: rows of a video that run together.
    """

    rows: int
    key_heads: int
    queries: int
    group: int
    blocks: int
    ports: int
    positions: int
    share: int = 1

    @property
    def passes(self) -> int:
        """Passes over the keys and values of a layer's heads."""
        return self.rows // self.share

    @property
    def lanes(self) -> int:
        """Query heads that run together, of all rows that do."""
        return self.group * self.share

    @property
    def runs(self) -> int:
        """Runs of query heads: the keys and values of a key head are read once per run."""
        return ceil(self.queries / self.group)

    @property
    def turns(self) -> int:
        """Key heads that are read in a pass, over all runs."""
        return self.key_heads * self.runs

    @property
    def layout(self) -> CacheLayout:
        """The filled part of a head's keys and values on the ports."""
        return CacheLayout(self.ports, self.blocks * BLOCK, self.positions)

    @property
    def words(self) -> int:
        """128-bit words that one port reads."""
        return self.passes * self.turns * (self.layout.key_words + self.layout.value_words)

    @property
    def value_words(self) -> int:
        """128-bit words of mantissas in a tile of values on one port."""
        return self.layout.value_tile_words - self.layout.value_head_words


@dataclass(frozen=True)
class AttendLoops:
    """The processes of ATTEND (fastcar_{attention,value}_processes.hpp): of one turn, or of one tile of values.

    A turn is a run of query heads that share a key head. Its keys come before the values of the turn before it.

    Args:
        split: that make the limbs of the queries, one after the other. multiply_keys, logits: of all keys.
        keep, soften: of all logits: the largest; their powers. invert: of their sum.
        weigh, limbs, multiply_values, add: of a tile of values. finish: of a head's result.
    """

    split: tuple[Loop, ...]
    multiply_keys: Loop
    logits: Loop
    keep: Loop
    soften: Loop
    invert: Loop
    weigh: Loop
    limbs: Loop
    multiply_values: Loop
    add: Loop
    finish: Loop


@lru_cache(maxsize=4096)
def attend_loops(work: AttendWork) -> AttendLoops:
    """Return the loops of a turn."""
    layout, blocks, floats = work.layout, work.blocks, work.blocks * BLOCK_FLOATS
    tile_keys, logit_depth = work.ports * LANES, READ + TO_FLOAT + 2 * MULTIPLY + blocks * ADD_CLOCKS
    # Few elements leave the loop empty turns: a total has to rest until the adder has written it.
    elements = max(blocks * layout.slots, TOTAL_DISTANCE)
    padded = layout.value_tiles * BLOCK
    keys, values = key_interval(blocks, work.ports), value_interval(work.ports)
    head = (
        Loop("split_queries", "copy_head", floats, COPY_DEPTH),
        Loop("split_query", "find_query_exponents", floats, LARGEST_DEPTH),
        Loop("split_query", "split_words", floats, READ + LIMBS_DEPTH + WRITE, keys),
    )
    sent = (
        Loop("split_queries", "copy_exponents", blocks, COPY_DEPTH),
        Loop("split_queries", "send_limbs", blocks * BLOCK_WORDS, COPY_DEPTH),
    )
    return AttendLoops(
        split=(*head * work.lanes, *sent),
        multiply_keys=Loop(
            "multiply_blocks", "multiply_words", layout.key_tiles * tile_key_words(layout), mac_depth(LANES)
        ),
        logits=Loop("scale_logits", "scale_keys", layout.key_tiles * (blocks + tile_keys), logit_depth, keys),
        keep=Loop("soften", "keep_logits", work.positions, WRITE + 2 * INTEGER),
        soften=Loop(
            "soften", "add_numerators", padded, READ + POWER_DEPTH, soften_interval(blocks, work.ports, work.lanes)
        ),
        invert=Loop("soften", "invert", work.lanes, INVERSE_DEPTH),
        weigh=Loop("weigh_values", "scale_weights", layout.value_head_words + blocks * QUADS, WEIGH_DEPTH, values),
        limbs=Loop("split_weights", "split_groups", blocks * QUADS, LIMBS_DEPTH, values),
        multiply_values=Loop("multiply_blocks", "multiply_words", work.value_words, mac_depth(LANES)),
        add=Loop("add_values", "add_sums", elements, TOTAL_DEPTH, TOTAL_INTERVAL),
        finish=Loop("finish_head", "finish_words", floats, FINISH_HEAD_DEPTH, PORTS_INTERVAL),
    )


def tile_key_words(layout: CacheLayout) -> int:
    """Return the 128-bit words of mantissas in a tile of keys on one port."""
    return layout.key_tile_words - layout.blocks


@dataclass(frozen=True)
class Repeated:
    """Loops that run one after the other, `times` times."""

    loops: tuple[Loop, ...]
    times: int = 1


@dataclass(frozen=True)
class VectorWork:
    """What the loops of a vector instruction depend on besides its fields.

    Args:
        rows: of the batch. computing: that compute, behind the layer's decision.
        ports: weight ports. axi_words: of them that an AXI port carries. control: sizes of the control table.
    """

    rows: int
    computing: int
    ports: int
    axi_words: int
    control: DrsTable
