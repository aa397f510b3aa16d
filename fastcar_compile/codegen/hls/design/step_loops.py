"""The loops of a step program's instructions: how often each iterates, how long its pipeline is, what it moves.

LINEAR and MLP are the array's (`loops.py`). The vector instructions run their loops one after the other. ATTEND is a region
of processes. The closed form and the cycle model use the same loops. Depths are estimates, as in `loops.py`.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD, DrsTable
from fastcar_compile.codegen.hls.design.control_loops import CHANGE_DEPTH, SHIFT, decision_loops
from fastcar_compile.codegen.hls.design.loops import (
    ADD_CLOCKS,
    COMPARE,
    DIVIDE,
    DRAFT_INTERVAL,
    INTEGER,
    MULTIPLY,
    READ,
    ROUND_DEPTH,
    TO_FLOAT,
    WRITE,
    Loop,
    mac_depth,
)
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program.cache_layout import BLOCK, BLOCK_WORDS, LANES, CacheLayout
from fastcar_compile.gates.draft import GAINS

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

TOTAL_DISTANCE = 8
"""Least turns of the loop over totals (TOTAL_DISTANCE of fastcar_attention_core.hpp)."""

NETWORK_LOOPS = ("network_scores", "sums_of_units")
"""Loops of the controller that read the network of gate `learned`."""

QUADS = BLOCK // FLOATS_PER_WORD
"""Groups of four positions in a tile of values."""


@dataclass(frozen=True)
class AttendWork:
    """What ATTEND has to do.

    Args:
        rows: of the batch. key_heads: of a layer. queries: query heads of a key head. group: of them that run together.
        blocks: of 32 elements in a head. ports: weight ports. positions: rows of the cache that are filled.
    """

    rows: int
    key_heads: int
    queries: int
    group: int
    blocks: int
    ports: int
    positions: int

    @property
    def runs(self) -> int:
        """Runs of query heads: the keys and values of a key head are read once per run."""
        return ceil(self.queries / self.group)

    @property
    def turns(self) -> int:
        """Key heads that are read for a row, over all runs."""
        return self.key_heads * self.runs

    @property
    def layout(self) -> CacheLayout:
        """The filled part of a head's keys and values on the ports."""
        return CacheLayout(self.ports, self.blocks * BLOCK, self.positions)

    @property
    def words(self) -> int:
        """128-bit words that one port reads."""
        return self.rows * self.turns * (self.layout.key_words + self.layout.value_words)

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
    head = (
        Loop("split_queries", "copy_head", floats, COPY_DEPTH),
        Loop("split_query", "find_query_exponents", floats, LARGEST_DEPTH),
        Loop("split_query", "split_words", floats, READ + LIMBS_DEPTH + WRITE),
    )
    sent = (
        Loop("split_queries", "copy_exponents", blocks, COPY_DEPTH),
        Loop("split_queries", "send_limbs", blocks * BLOCK_WORDS, COPY_DEPTH),
    )
    return AttendLoops(
        split=(*head * work.group, *sent),
        multiply_keys=Loop(
            "multiply_blocks", "multiply_words", layout.key_tiles * tile_key_words(layout), mac_depth(LANES)
        ),
        logits=Loop("scale_logits", "scale_keys", layout.key_tiles * (blocks + tile_keys), logit_depth),
        keep=Loop("soften", "keep_logits", work.positions, WRITE + 2 * INTEGER),
        soften=Loop("soften", "add_numerators", padded, READ + POWER_DEPTH),
        invert=Loop("soften", "invert", work.group, INVERSE_DEPTH),
        weigh=Loop("weigh_values", "scale_weights", layout.value_head_words + blocks * QUADS, WEIGH_DEPTH),
        limbs=Loop("split_weights", "split_groups", blocks * QUADS, LIMBS_DEPTH),
        multiply_values=Loop("multiply_blocks", "multiply_words", work.value_words, mac_depth(LANES)),
        add=Loop("add_values", "add_sums", elements, TOTAL_DEPTH),
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


def vector_loops(instruction: step.Instruction, work: VectorWork) -> tuple[Repeated, ...]:
    """Return the loops of an instruction without a product, as far as they iterate; none of END."""
    return tuple(part for part in _loops_of(instruction, work) if part.times > 0)


def _loops_of(instruction: step.Instruction, work: VectorWork) -> tuple[Repeated, ...]:
    match instruction:
        case step.Load(count=count) | step.Store(count=count):
            return (Repeated((Loop("rows", "move_words", count, WRITE, moves=True),), work.rows),)
        case step.Norm():
            return _norm(instruction, work)
        case step.Rotate():
            return _rotate(instruction, work)
        case step.Add(count=count):
            return (Repeated((Loop("add_row", "add_words", count, ADD_DEPTH),), work.rows),)
        case step.Append():
            return _append(instruction, work)
        case step.Decide():
            return _decide(instruction, work)
        case step.Replay():
            return _replay(instruction, work)
        case step.Recall():
            return _recall(instruction, work)
        case _:
            return ()


def _norm(norm: step.Norm, work: VectorWork) -> tuple[Repeated, ...]:
    """Return the loops of the first row or piece, whose first pass reads the weight, and those of the others."""
    weight = Loop("normalize", "read_weight", norm.count, LARGEST_DEPTH, moves=True)
    largest = Loop("normalize", "find_largest", norm.count, LARGEST_DEPTH)
    rest = (
        Loop("normalize", "add_squares", norm.count, SQUARES_DEPTH),
        Loop("normalize", "inverse_root", 1, NORM_ROOT_DEPTH),
        Loop("normalize", "scale_words", norm.count, NORM_DEPTH),
    )
    if isinstance(norm, step.LayerNorm):
        centred = (
            Loop("center", "find_largest_value", norm.count, LARGEST_DEPTH),
            Loop("center", "add_values", norm.count, SUM_DEPTH),
            Loop("center", "mean", 1, MEAN_DEPTH),
            Loop("center", "subtract_mean", norm.count, ADD_DEPTH),
        )
        rest = (*centred, *rest, Loop("norm_rows", "add_bias", norm.count, ADD_DEPTH, moves=True))
    # The first pass reads the norm's weight from memory. It stays on chip for the other rows and pieces.
    done = work.computing * norm.pieces
    return Repeated((weight, *rest), min(done, 1)), Repeated((largest, *rest), done - 1)


def _rotate(rotate: step.Rotate, work: VectorWork) -> tuple[Repeated, ...]:
    half = rotate.half_words
    table = tuple(Loop("rotate_rows", label, half, WRITE, moves=True) for label in ("read_cosines", "read_sines"))
    words = Loop("rotate_row", "rotate_words", rotate.heads * rotate.head_words, ROTATE_DEPTH, PORTS_INTERVAL)
    return (Repeated((*table, words), work.rows),)


def _append(append: step.Append, work: VectorWork) -> tuple[Repeated, ...]:
    """Return the loops of each row's first head, whose quantisation others do not wait for, and of a port that stores."""
    floats, words = append.blocks * BLOCK_FLOATS, append.blocks * BLOCK_WORDS
    quantize = (
        Loop("quantize_row", "copy_head", floats, COPY_DEPTH),
        Loop("quantize_head", "find_exponents", floats, LARGEST_DEPTH),
        Loop("quantize_head", "round_mantissas", floats, MANTISSA_DEPTH),
        Loop("quantize_heads", "send_words", words + 1, COPY_DEPTH),
    )
    take = (Loop("store_heads", "take_mantissas", words, WRITE), Loop("store_heads", "take_exponents", 1, WRITE))
    if isinstance(append, step.AppendKeys):
        # A beat of several ports' words is read before it is written: the other ports' words have to stay.
        read = (append.blocks, words) if work.axi_words > 1 else (append.blocks,)
        store = (
            *(Loop("append_key", "read_each_beat", beats, WRITE, moves=True) for beats in read),
            Loop("append_key", "write_exponents", append.blocks, REPLACE_DEPTH, moves=True),
            Loop("append_key", "write_mantissas", words, REPLACE_DEPTH, moves=True),
        )
    else:
        # A position is one lane of every word of its tile, so the whole tile is read and written.
        tile = CacheLayout(work.ports, append.blocks * BLOCK, BLOCK).value_tile_words
        store = (
            Loop("append_value", "begin_ports", work.axi_words, WRITE),
            Loop("append_value", "read_each_beat", tile, WRITE, moves=True),
            Loop("append_value", "write_values", tile, REPLACE_DEPTH, moves=True),
        )
    # The heads of one position are on all ports for keys. For values every port stores a part of each head.
    keys = isinstance(append, step.AppendKeys)
    own = ceil(append.heads * work.axi_words / work.ports) if keys else append.heads
    # A row begins when the row before it is in memory.
    return Repeated(quantize, work.rows), Repeated(take, work.rows * append.heads), Repeated(store, work.rows * own)


def _decide(decide: step.Decide, work: VectorWork) -> tuple[Repeated, ...]:
    chain = Repeated((Loop("call_controller", "chain_counts", 1, READ, moves=True),), work.rows)
    loops = decision_loops(work.control)
    # Of what the controller reads, only a network is not on chip; it writes its answer into the report.
    memory = (*NETWORK_LOOPS, "write_answer")
    gate = tuple(loop if loop.process in memory else replace(loop, moves=False) for loop in loops)
    kept = Loop("keep_inputs", "keep_words", decide.count, READ, moves=True)
    return (
        *_gather(decide, work),
        chain,
        Repeated(gate),
        chain,
        Repeated((kept,), work.computing if decide.count else 0),
    )


def _gather(decide: step.Decide, work: VectorWork) -> tuple[Repeated, ...]:
    """Return the loops that bring q and the cached key, or x and the kept x, where the controller reads them."""
    floats = decide.blocks * BLOCK_FLOATS
    rows = Loop("gather_rows", "gather_words", decide.heads * floats + decide.count, COPY_DEPTH)
    key = (
        Loop("read_keys", "read_key_exponents", decide.blocks, WRITE, moves=True),
        Loop("read_keys", "read_key_mantissas", decide.blocks * BLOCK_WORDS, WRITE, moves=True),
    )
    # Others are expanded while the next one is read.
    last = (
        Loop("expand_keys", "take_key", decide.blocks * (1 + BLOCK_WORDS), WRITE),
        Loop("expand_key", "expand_words", floats, EXPAND_DEPTH),
    )
    inputs = Loop("gather_inputs", "gather_kept_words", decide.count, WRITE, moves=True)
    return (
        Repeated((rows,), work.rows),
        Repeated(key, work.rows * ceil(decide.key_heads * work.axi_words / work.ports)),
        Repeated(last, work.rows if decide.key_heads else 0),
        Repeated((inputs,), work.rows if decide.count else 0),
    )


def _replay(replay: step.Replay, work: VectorWork) -> tuple[Repeated, ...]:
    add = Loop("add_row", "add_words", replay.count, ADD_DEPTH)
    kept = Loop("add_rows", "keep_words", replay.count, READ, moves=True)
    read = (Loop("add_rows", "replay_words", replay.count, ADD_DEPTH, moves=True),)
    if isinstance(replay, step.ReplayDraft):
        read = (Loop("add_rows", "draft_words", replay.count, DRAFT_DEPTH, DRAFT_INTERVAL, moves=True), add)
    return Repeated((kept, add), work.computing), Repeated(read, work.rows - work.computing)


def _recall(recall: step.Recall, work: VectorWork) -> tuple[Repeated, ...]:
    table = Loop("recall_rows", "read_gains", step.GAIN_WORDS, WRITE, moves=True)
    words = Loop("recall_rows", "recall_words", recall.count, CHANGE_DEPTH, DRAFT_INTERVAL, moves=True)
    change = Loop("recall_rows", "change", 1, TO_FLOAT + COMPARE + DIVIDE)
    gain = Loop("gain_of", "find_gain", GAINS - 1, COMPARE)
    replaying = work.rows - work.computing
    return Repeated((table,), min(replaying, 1)), Repeated((words, change, gain), replaying)
