"""One start of the engine as a network: controller, then the processes of fastcar_engine_processes.hpp with what lies
between them.

Trips and depths come from the loop tables (codegen/hls/design/loops.py, controller.py), which the closed form of
`estimate` uses too.
"""

from collections.abc import Iterator
from itertools import chain

from cycle_model.network import Action, Blocks, Claim, Fifo, Free, Network, Post, Run, Take
from fastcar_compile.artifact.engine import float_words
from fastcar_compile.codegen.hls.design.controller import control_loops
from fastcar_compile.codegen.hls.design.loops import SEND_DEPTH, STREAM_DEPTH, Loop, load_loop, places_loop, tile_loops
from fastcar_compile.codegen.hls.model.engine import EngineCall, EngineMemory, LoopCall

ARRAY = "mac_tile"
"""The process with the multipliers."""

VECTOR = "vector"
"""The sequencer with the loops of an instruction that has no product."""

CONTROL = "control"
"""The TAS unit and controller, and the decoding of the call: its loops run before the array starts."""

MEMORY = "memory"
SMALL_FIFO = 16
"""Words of the FIFOs besides those of the weight ports (FASTCAR_FIFO in fastcar_engine.cpp.j2)."""

HEAD_COPIES, COPIES = 3, 2
"""Copies of the blocks between the processes of a tile: heads skip the multiplication (FASTCAR_BLOCKS)."""

STARTED = ("read_rows", "read_weights", "share_weights", "compute", "write_rows")
"""Processes that wait for nothing else in the region."""

TILE_BLOCKS = (
    ("head", HEAD_COPIES, "fetch_tile", "scale_tile"),
    ("tile", COPIES, "fetch_tile", "mac_tile"),
    ("acc", COPIES, "mac_tile", "scale_tile"),
    ("value", COPIES, "scale_tile", "finish_tile"),
    ("results", COPIES, "finish_tile", "send_tile"),
)


def engine_network(call: EngineCall, memory: EngineMemory) -> Network:
    """Return the network of a call: the controller alone, or with the array."""
    if call.products:
        return _array_network(call, memory)
    return _behind_control(call, memory, Network({}))


def loop_network(call: LoopCall, memory: EngineMemory) -> Network:
    """Return the network of an instruction whose loops run one after the other."""
    return Network({VECTOR: _loops(call, memory)}, memories={MEMORY: memory})


def _loops(call: LoopCall, memory: EngineMemory) -> Iterator[Action]:
    for part in call.parts:
        for _time in range(part.times):
            yield from (_one(loop, memory) for loop in part.loops if loop.trips)


def _one(loop: Loop, memory: EngineMemory) -> Run:
    latency = loop.depth + 1 + (memory.latency if loop.moves else 0)
    return Run(loop.label, loop.trips, loop.interval, latency, memory=MEMORY if loop.moves else None)


def _behind_control(call: EngineCall, memory: EngineMemory, region: Network) -> Network:
    """Return a DATAFLOW region that starts when the controller is done. Its processes start together."""
    starts = {name: f"start of {name}" for name in region.processes if name in STARTED}
    processes = {CONTROL: _control(call, memory, tuple(starts.values()))} | {
        name: chain([Take(starts[name]), Free(starts[name])], actions) if name in starts else actions
        for name, actions in region.processes.items()
    }
    started = {text: Blocks(1, CONTROL, name) for name, text in starts.items()}
    return Network(processes, region.fifos, {**started, **region.blocks}, {MEMORY: memory})


def _control(call: EngineCall, memory: EngineMemory, starts: tuple[str, ...]) -> Iterator[Action]:
    yield from (_one(loop, memory) for loop in control_loops(call.control))
    for start in starts:
        yield from (Claim(start), Post(start))


def _array_network(call: EngineCall, memory: EngineMemory) -> Network:
    processes = {
        "read_rows": _read_rows(call, memory),
        "read_weights": _read_weights(call, memory),
        "share_weights": _share_weights(call),
        "compute": _compute(call),
        "fetch_tile": _fetch(call),
        "mac_tile": _stage(call, 1, ("tile",), ("acc",)),
        "scale_tile": _stage(call, 2, ("head", "acc"), ("value",)),
        "finish_tile": _stage(call, 3, ("value",), ("results",)),
        "send_tile": _send(call),
        "write_rows": _write_rows(call),
    }
    fifos = {
        "ports": Fifo(call.fifo_words, "read_weights", "share_weights"),
        "weights": Fifo(SMALL_FIFO, "share_weights", "fetch_tile"),
        "rows_in": Fifo(SMALL_FIFO, "read_rows", "compute"),
        "rows_out": Fifo(SMALL_FIFO, "send_tile", "write_rows"),
    }
    blocks = {name: Blocks(copies, writer, reader) for name, copies, writer, reader in TILE_BLOCKS}
    blocks["start of a product"] = Blocks(1, "compute", "fetch_tile")
    blocks["end of a product"] = Blocks(1, "send_tile", "compute")
    return _behind_control(call, memory, Network(processes, fifos, blocks))


def _run(loop: Loop, name: str, *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> list[Run]:
    """Return a loop of the table; none where it does not iterate."""
    return [Run(name, loop.trips, 1, loop.depth + 1, reads, writes)] if loop.trips else []


def _read_rows(call: EngineCall, memory: EngineMemory) -> list[Action]:
    words = float_words(call.products[0].product.inputs)
    if call.rows_on_chip:
        return [Run("x", words, 1, SEND_DEPTH, writes=("rows_in",))] * call.load.rows
    return [Run("x", words, 1, memory.latency, writes=("rows_in",), memory=MEMORY)] * call.load.rows


def weight_words(call: EngineCall) -> int:
    """Return the 128-bit words of weights that the array takes of one port."""
    return sum(named.product.port_words for named in call.products)


def _read_weights(call: EngineCall, memory: EngineMemory) -> list[Action]:
    return [Run("weights", weight_words(call), 1, memory.latency, writes=("ports",), memory=MEMORY, words=call.ports)]


def _share_weights(call: EngineCall) -> list[Action]:
    return [Run("words", weight_words(call), 1, STREAM_DEPTH, reads=("ports",), writes=("weights",))]


def _compute(call: EngineCall) -> Iterator[Action]:
    yield from _run(places_loop(), "places")
    yield from _run(load_loop(call.products[0].product.inputs, call.load), "load rows", reads=("rows_in",))
    for number in range(len(call.products)):
        for loop in call.before(number):
            yield from _run(loop, "quantise")
        yield Claim("start of a product")
        yield Post("start of a product")
        yield Take("end of a product")
        yield Free("end of a product")


def _fetch(call: EngineCall) -> Iterator[Action]:
    for place, named in enumerate(call.products):
        loop = tile_loops(named.product, call.load_of(place), inner=named.inner).fetch
        yield Take("start of a product")
        yield Free("start of a product")
        for _tile in range(named.product.tiles):
            yield Claim("head")
            yield Claim("tile")
            yield from _run(loop, named.name, reads=("weights",))
            yield Post("head")
            yield Post("tile")


def _stage(call: EngineCall, number: int, taken: tuple[str, ...], filled: tuple[str, ...]) -> Iterator[Action]:
    """Yield the actions of a process between fetching and sending."""
    for place, named in enumerate(call.products):
        loop = tile_loops(named.product, call.load_of(place), inner=named.inner).stages[number]
        for _tile in range(named.product.tiles):
            yield from (Take(name) for name in taken)
            yield from (Claim(name) for name in filled)
            yield from _run(loop, named.name)
            yield from (Free(name) for name in taken)
            yield from (Post(name) for name in filled)


def _send(call: EngineCall) -> Iterator[Action]:
    for place, named in enumerate(call.products):
        loop = tile_loops(named.product, call.load_of(place), inner=named.inner).send
        yield Claim("end of a product")
        for _tile in range(named.product.tiles):
            yield Take("results")
            yield from _run(loop, named.name, writes=("rows_out",))
            yield Free("results")
        yield Post("end of a product")


def _write_rows(call: EngineCall) -> Iterator[Action]:
    last = call.products[-1]
    loop = tile_loops(last.product, call.load_of(len(call.products) - 1)).send
    for _tile in range(last.product.tiles):
        if loop.trips:
            memory_of_rows = None if call.results_on_chip else MEMORY
            yield Run("results", loop.trips, 1, STREAM_DEPTH, reads=("rows_out",), memory=memory_of_rows)
