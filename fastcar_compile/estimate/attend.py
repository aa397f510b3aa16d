"""Time of the instruction ATTEND in closed form."""

from __future__ import annotations

from fastcar_compile.codegen.hls.design.loops import STREAM_DEPTH
from fastcar_compile.codegen.hls.design.step_loops import AttendWork, attend_loops
from fastcar_compile.estimate.memory import Memory


def attend_clocks(work: AttendWork, memory: Memory) -> float:
    """Return the clocks: turns at the pace of the cache, the softmax or the queries, and the end of the last one."""
    layout, loops = work.layout, attend_loops(work)
    rate = min(1 - memory.refreshing, memory.rate / work.ports)
    keys = memory.latency + max(layout.key_words / rate, loops.logits.trips)
    tile = max(
        layout.value_tile_words / rate,
        loops.weigh.cycles,
        loops.limbs.trips,
        loops.multiply_values.trips,
        loops.add.trips,
    )
    values = memory.latency + layout.value_tiles * tile
    softmax = loops.keep.cycles + loops.soften.cycles + loops.invert.cycles
    split = sum(loop.cycles for loop in loops.split)
    # The values of the last turn wait until its softmax is done, and nothing else is read meanwhile.
    wait = max(0.0, loops.logits.depth + loops.keep.depth + loops.soften.cycles - memory.latency)
    first = STREAM_DEPTH + max(0.0, split - memory.latency)
    last = loops.weigh.depth + loops.limbs.depth + loops.multiply_values.depth + loops.add.depth
    turns = max(
        work.turns * (keys + values) + wait,
        keys + work.turns * softmax + values,
        (work.turns - 1) * split + keys + values,
    )
    return first + turns + last + work.group * loops.finish.cycles
