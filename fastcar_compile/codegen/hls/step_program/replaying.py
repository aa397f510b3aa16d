"""Instructions of layers that replay (`instructions.py`): decisions, slots and drafts."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated

from fastcar_compile.codegen.hls.control_table.table import MAX_UNITS
from fastcar_compile.codegen.hls.design import step_loops as cost
from fastcar_compile.codegen.hls.design.controller import CHANGE_DEPTH, decision_loops
from fastcar_compile.codegen.hls.design.loops import COMPARE, DIVIDE, DRAFT_INTERVAL, TO_FLOAT
from fastcar_compile.codegen.hls.step_program import instruction as of
from fastcar_compile.codegen.hls.step_program.instructions import ADDS, HEADS, KEYS
from fastcar_compile.gates.draft import GAINS
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.ir.types import StateRole

NETWORK = of.At("constant_words", "network_words_of(units, count)")
SLOTS = "(slots * videos + staged) * count"


@dataclass(frozen=True)
class Decide(of.Instruction, opcode=10):
    """Score and gate of the layer by the table: which rows of the next MLP compute.

    The replay buffer has a memory word per slot and video with its chain count, those of the layer from word `chain` on:
    a row changes no word that other rows change. Where a video has several rows, what each row of the last launch
    staged is behind the slots, here and wherever slots are, and is committed first. Fields of what the gate does not read are 0, so that a program cannot
    hide data in them.

    Args:
        heads .. ring: of q, and of the cached key of position - stride, of a gate that reads q.
        count, inputs: x has `count` words a row, of a gate that reads the MLP's input. The x of the last forward that
            computed is kept in the replay buffer from word `inputs` on, slot after slot, video after video.
        network, units: of gate `learned`; the word of the layer's network in the constants, and its hidden units.
    """

    kernel = "decide"
    rules = (
        f"not reads_query(gate) or ({HEADS})",
        "reads_query(gate) or heads + key_heads + blocks + keys + sinks + ring == 0",
        "reads_query(gate) or (counts(count) and count <= x_words)",
        "not reads_query(gate) or count + inputs == 0",
        f"gate != {GateKind.LEARNED} or (units >= 1 and units <= {MAX_UNITS})",
        f"gate == {GateKind.LEARNED} or network + units == 0",
    )
    gate: of.Gate
    stride: of.Count
    chain: Annotated[int, of.At("replay_words", "stride * videos + staged", StateRole.CHAIN_COUNT)]
    heads: int = 0
    key_heads: int = 0
    blocks: int = 0
    keys: Annotated[int, KEYS] = 0
    sinks: int = 0
    ring: int = 0
    count: int = 0
    inputs: Annotated[int, of.At("replay_words", "(stride * videos + staged) * count", StateRole.GATE_CACHE)] = 0
    network: Annotated[int, NETWORK] = 0
    units: int = 0

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """See of.Instruction.loops."""
        chain = cost.Repeated((cost.Loop("call_controller", "chain_counts", 1, cost.READ, moves=True),), work.rows)
        loops = decision_loops(work.control, apart=True)
        # Of what the controller reads, only a network is not on chip; it writes its answer into the report.
        memory = (*cost.NETWORK_LOOPS, "write_answer")
        gate = tuple(loop if loop.process in memory else replace(loop, moves=False) for loop in loops)
        kept = cost.Loop("keep_inputs", "keep_words", self.count, cost.READ, moves=True)
        return (
            *self._gather(work),
            chain,
            cost.Repeated(gate),
            chain,
            cost.Repeated((kept,), work.computing if self.count else 0),
        )

    def _gather(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """Return the loops that bring q and the cached key, or x and the kept x, where the controller reads them."""
        floats = self.blocks * cost.BLOCK_FLOATS
        rows = cost.Loop("gather_row", "gather_words", self.heads * floats + self.count, cost.COPY_DEPTH)
        key = (
            cost.Loop("read_keys", "read_key_exponents", self.blocks, cost.WRITE, moves=True),
            cost.Loop("read_keys", "read_key_mantissas", self.blocks * cost.BLOCK_WORDS, cost.WRITE, moves=True),
        )
        # Others are expanded while the next one is read.
        last = (
            cost.Loop("expand_keys", "take_key", self.blocks * (1 + cost.BLOCK_WORDS), cost.WRITE),
            cost.Loop("expand_key", "expand_words", floats, cost.EXPAND_DEPTH),
        )
        inputs = cost.Loop("gather_inputs", "gather_kept_words", self.count, cost.WRITE, moves=True)
        return (
            cost.Repeated((rows,), work.rows),
            cost.Repeated(key, work.rows * ceil(self.key_heads * work.axi_words / work.ports)),
            cost.Repeated(last, work.rows if self.key_heads else 0),
            cost.Repeated((inputs,), work.rows if self.count else 0),
        )


@dataclass(frozen=True)
class DecideRows(of.Instruction, opcode=13):
    """DECIDE of a short program: behind the list of rows come `query_words` of q or x of all rows, `key_words` of the cached key or x (operands). `count` words are a row of x, where there is a network."""

    kernel = "decide"
    rules = (
        "rows + query_words + key_words <= input_words",
        "units > 0 or network + count == 0",
        f"units == 0 or (units <= {MAX_UNITS} and counts(count) and query_words == rows * count)",
    )
    query_words: int
    key_words: int
    network: Annotated[int, NETWORK] = 0
    units: int = 0
    count: int = 0


@dataclass(frozen=True)
class Replay(of.Instruction, opcode=11):
    """Where a row computed: keeps Y in its slot and adds it to X; elsewhere adds what the slot holds."""

    kernel = ADDS
    count: of.XWords
    slots: of.Count
    cache: Annotated[int, of.At("replay_words", SLOTS, StateRole.MLP_CACHE)]

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """See of.Instruction.loops."""
        add = cost.Loop("add_row", "add_words", self.count, cost.ADD_DEPTH)
        kept = cost.Loop("add_rows", "keep_words", self.count, cost.READ, moves=True)
        read = cost.Loop("add_rows", "replay_words", self.count, cost.WRITE, moves=True)
        if isinstance(self, ReplayDraft):
            read = cost.Loop("add_rows", "draft_words", self.count, cost.DRAFT_DEPTH, DRAFT_INTERVAL, moves=True)
        return cost.Repeated((kept, add), work.computing), cost.Repeated((read, add), work.rows - work.computing)


@dataclass(frozen=True)
class ReplayDraft(Replay, opcode=16):
    """REPLAY, but where a row replays it adds bias + g (slot - bias) + Y, in this order."""

    bias: Annotated[int, of.At("constant_words", "count")]


@dataclass(frozen=True)
class Recall(of.Instruction, opcode=14):
    """Where a row replays: brings the x of its slot behind the x of A, and finds the gain of its draft.

    Args:
        slots, inputs: the slots that keep x, as Decide's stride and inputs.
        table: of the layer's draft, its edges and its gains.
    """

    kernel = "step::recall_rows<StepConfig>(f, sizes, list.deciding & ~computing, list, constants, replay, gain, a)"
    count: Annotated[int, "counts({0})", "2 * {0} <= a_words"]
    slots: of.Count
    inputs: Annotated[int, of.At("replay_words", SLOTS)]
    table: Annotated[int, of.At("constant_words", f"{of.GAIN_WORDS}")]

    def _parts(self, work: cost.VectorWork) -> tuple[cost.Repeated, ...]:
        """See of.Instruction.loops."""
        table = cost.Loop("recall_rows", "read_gains", of.GAIN_WORDS, cost.WRITE, moves=True)
        words = cost.Loop("recall_rows", "recall_words", self.count, CHANGE_DEPTH, DRAFT_INTERVAL, moves=True)
        change = cost.Loop("recall_rows", "change", 1, TO_FLOAT + COMPARE + DIVIDE)
        gain = cost.Loop("gain_of", "find_gain", GAINS - 1, COMPARE)
        replaying = work.rows - work.computing
        return cost.Repeated((table,), min(replaying, 1)), cost.Repeated((words, change, gain), replaying)


@dataclass(frozen=True)
class DraftRows(of.Instruction, opcode=15, name="DRAFT"):
    """Where a row replays: its draft, from A to Y, one request of the array; `weights` is its first word on every port.

    Of two rows for each that replays: neurons and linear features of x and of the recalled x; what the gain leaves of
    their difference; then the output of one row.

    Args:
        tile, tiles, bias: of its first product. outer_tile, outer_tiles: of its second.
    """

    kernel = "multiply"
    rules = ("counts(neurons + rank)",)
    neurons: of.Count
    rank: of.Count
    tile: of.Count
    tiles: of.Count
    bias: of.Bit
    outer_tile: of.Count
    outer_tiles: of.Count
    weights: of.Weights


OF_DRAFTS = (Recall, DraftRows)
OF_REPLAY = (Decide, *OF_DRAFTS)  # besides Replay, which is ADD where a layer does not replay
