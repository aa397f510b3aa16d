"""The control table: bytes, JSON twin, and a defined status for every damage, in both readers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drs.tables import FRAME, LIMITS, ONE, Controller, call_for, changed, repaired, table_for
from fastcar_compile.drs.builder import GateScore, build_table
from fastcar_compile.drs.reader import Header, read_table
from fastcar_compile.drs.simulator import CAPACITY
from fastcar_compile.drs.table import (
    HEADER_WORDS,
    LAYER_FIELDS,
    MAGIC,
    NONE,
    VERSION,
    AttentionShape,
    GateKind,
    Opcode,
    Status,
)
from fastcar_compile.errors import UserError

INFINITY = float("inf")
WORD = {name: i for i, name in enumerate(Header._fields)}
GOOD = table_for().to_bytes()
PAIRS = table_for(4, couple_cfg=True).to_bytes()
INSTRUCTION = HEADER_WORDS + LAYER_FIELDS * 3
"""Word of the first instruction of GOOD."""
DEEP = table_for(attention=AttentionShape(1, 1, 4 * LIMITS.key_words + 1)).to_bytes()
"""A row of the key is one word longer than the hardware's buffer."""
WIDE = table_for(attention=AttentionShape(LIMITS.query_words + 1, 1, 4)).to_bytes()
"""A row of q is one word longer than the hardware's loop."""


OTHER = table_for(gate=GateScore(GateKind.RANDOM)).to_bytes()
WEIGHTED = table_for(attention=AttentionShape(2, 1, 2), gate=GateScore(heads=(((1, 0.5),), None, None))).to_bytes()
MANY = table_for(attention=AttentionShape(LIMITS.heads + 1, 1, 1), gate=GateScore(heads=(((0, 1.0),),) * 3)).to_bytes()
"""One query head more has a weight than the hardware has room for."""


def header(field: str, value: int, data: bytes = GOOD) -> bytes:
    """`data` with one header field replaced, and the CRC-32 made to fit."""
    return changed(data, WORD[field], value)


DAMAGED: dict[str, tuple[bytes, Status]] = {
    "empty": (b"", Status.TOO_SHORT),
    "header cut": (GOOD[: 4 * HEADER_WORDS - 1], Status.TOO_SHORT),
    "magic": (header("magic", 0x53524447), Status.BAD_MAGIC),
    "version 3": (header("version", 3), Status.BAD_VERSION),
    "version 5": (header("version", 5), Status.BAD_VERSION),
    "one byte cut": (GOOD[:-1], Status.BAD_LENGTH),
    "one byte more": (GOOD + b"\0", Status.BAD_LENGTH),
    "one word more": (GOOD + bytes(4), Status.BAD_LENGTH),
    "length field": (header("words", 0xFFFFFFFF), Status.BAD_LENGTH),
    "longer than any": (header("words", len(GOOD) // 4 + 65536, GOOD + bytes(4 * 65536)), Status.BAD_LENGTH),
    "longer than the hardware": (table_for(32, layers=60).to_bytes(), Status.BAD_LENGTH),
    "crc": (changed(GOOD, WORD["crc"], 0, repair=False), Status.BAD_CRC),
    "flipped threshold": (changed(GOOD, HEADER_WORDS, 1, repair=False), Status.BAD_CRC),
    "no layers": (header("layers", 0), Status.BAD_HEADER),
    "other layer count": (header("layers", 2), Status.BAD_HEADER),
    "layer count that overflows": (header("layers", 0x80000000), Status.BAD_HEADER),
    "no rows": (header("rows", 0), Status.BAD_HEADER),
    "33 rows": (header("rows", 33), Status.BAD_HEADER),
    "no cores": (header("cores", 0), Status.BAD_HEADER),
    "more cores than the hardware": (header("cores", LIMITS.cores + 1), Status.BAD_HEADER),
    "no tokens per frame": (header("tokens_per_frame", 0), Status.BAD_HEADER),
    "instruction words": (header("layer_words", 9), Status.BAD_HEADER),
    "instruction words above the limit": (header("layer_words", 129), Status.BAD_HEADER),
    "gate 0": (header("gate", 0), Status.BAD_HEADER),
    "gate of another kernel": (OTHER, Status.BAD_HEADER),
    "gate that is not there": (header("gate", 8), Status.BAD_HEADER),
    "unknown flag": (header("flags", 2, PAIRS), Status.BAD_HEADER),
    "pairs of an odd batch": (header("flags", 1), Status.BAD_HEADER),
    "max_chain 0": (header("max_chain", 0), Status.BAD_HEADER),
    "max_chain negative": (header("max_chain", 0x80000000), Status.BAD_HEADER),
    "no heads": (header("heads", 0), Status.BAD_HEADER),
    "no key heads": (header("kv_heads", 0), Status.BAD_HEADER),
    "no head_dim": (header("head_dim", 0), Status.BAD_HEADER),
    "heads that are no multiple": (header("kv_heads", 2), Status.BAD_HEADER),
    "too many products": (header("heads", 65535, header("head_dim", 2)), Status.BAD_HEADER),
    "heads that overflow": (header("heads", 65536, header("head_dim", 65536)), Status.BAD_HEADER),
    "key larger than the hardware": (DEEP, Status.BAD_HEADER),
    "q larger than the hardware": (WIDE, Status.BAD_HEADER),
    "group": (header("group", 2), Status.BAD_HEADER),
    "group that overflows": (header("group", 0x10001), Status.BAD_HEADER),
    "words of a head": (header("head_words", 2), Status.BAD_HEADER),
    "words of a row of q": (header("row_query_words", 2), Status.BAD_HEADER),
    "words of a row of the key": (header("row_key_words", 0), Status.BAD_HEADER),
    "words of q": (header("query_words", 4), Status.BAD_HEADER),
    "words of the key": (header("key_words", 2), Status.BAD_HEADER),
    "thresholds offset": (header("thresholds", HEADER_WORDS + 1), Status.BAD_HEADER),
    "factors offset": (header("factors", 0), Status.BAD_HEADER),
    "prefetch offset": (header("prefetch", HEADER_WORDS + 7), Status.BAD_HEADER),
    "programs offset": (header("programs", HEADER_WORDS + 8), Status.BAD_HEADER),
    "instructions offset": (header("instructions", HEADER_WORDS + 11), Status.BAD_HEADER),
    "reserved": (header("reserved", 1), Status.BAD_HEADER),
    "units without a network": (header("units", 1), Status.BAD_HEADER),
    "refresh within a frame": (header("refresh_period", FRAME - 1), Status.BAD_HEADER),
    "an input that is not read": (header("input_words", 1), Status.BAD_HEADER),
    "a distance that is not computed": (header("distance_weight", 0x3F800000), Status.BAD_HEADER),
    "head weights elsewhere": (header("head_weights", HEADER_WORDS, WEIGHTED), Status.BAD_HEADER),
    "head weights that are not there": (header("head_weights", len(GOOD) // 4), Status.BAD_HEADER),
    "more weighted heads than the hardware": (MANY, Status.BAD_HEADER),
    "a layer's offset": (changed(GOOD, INSTRUCTION - 1, INSTRUCTION), Status.BAD_INSTRUCTION),
    "no end in the last layer": (changed(GOOD, INSTRUCTION + 29, 0x05FF0002), Status.BAD_INSTRUCTION),
    "opcode 0": (changed(GOOD, INSTRUCTION, 0x00FF0000), Status.BAD_INSTRUCTION),
    "opcode 7": (changed(GOOD, INSTRUCTION, 0x07FF0000), Status.BAD_INSTRUCTION),
    "row on a load": (changed(GOOD, INSTRUCTION, 0x01000000), Status.BAD_INSTRUCTION),
    "row beyond the batch": (changed(GOOD, INSTRUCTION + 1, 0x02030000), Status.BAD_INSTRUCTION),
    "compute without a row": (changed(GOOD, INSTRUCTION + 1, 0x02FF0000), Status.BAD_INSTRUCTION),
    "word of another layer": (changed(GOOD, INSTRUCTION, 0x01FF0001), Status.BAD_INSTRUCTION),
    "no end": (changed(GOOD, INSTRUCTION + 9, 0x05FF0000), Status.BAD_INSTRUCTION),
}
OF_THE_HARDWARE = (
    "more cores than the hardware",
    "key larger than the hardware",
    "q larger than the hardware",
    "longer than the hardware",
    "gate of another kernel",
    "more weighted heads than the hardware",
)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_table_has_a_defined_status(controller: Controller, name: str) -> None:
    data, expected = DAMAGED[name]
    for register in (0, 0b101, 0b111):
        trace = controller.agreed(data, call_for(register, held=2))
        assert (trace.status, trace.records, trace.held, trace.index_register) == (expected, (), 2, 0)


@pytest.mark.parametrize("name", [n for n in DAMAGED if n not in OF_THE_HARDWARE])
def test_a_damaged_table_is_refused(name: str) -> None:
    data, expected = DAMAGED[name]
    with pytest.raises(UserError, match=f"the DRS table is not valid: {expected.name}"):
        read_table(data)


def test_a_table_of_an_older_version_says_both_versions() -> None:
    with pytest.raises(UserError, match=r"BAD_VERSION, its version is 3, and this program reads version 4") as caught:
        read_table(header("version", 3))
    assert caught.value.hint == "compile the model again"


def test_the_hardware_refuses_what_the_format_allows() -> None:
    for name in OF_THE_HARDWARE:
        assert read_table(DAMAGED[name][0]).rows >= 3


@pytest.mark.parametrize("layer", [3, 65535, 0xFFFFFFFF])
def test_a_layer_that_is_not_there(controller: Controller, layer: int) -> None:
    assert controller.agreed(GOOD, call_for(0, layer=layer)).status is Status.BAD_LAYER


@pytest.mark.parametrize(("field", "extra"), [("query", 1), ("query", -1), ("key", 1), ("key", -3)])
def test_operands_of_another_size(controller: Controller, field: str, extra: int) -> None:
    call = call_for(0)
    words = np.zeros((len(call.query) + extra, 4), np.float32)
    trace = controller.agreed(GOOD, replace(call, **{field: words}))
    assert (trace.status, trace.records) == (Status.BAD_OPERANDS, ())


def test_every_status_occurs() -> None:
    elsewhere = {Status.OK, Status.NO_TABLE, Status.BAD_LAYER, Status.BAD_OPERANDS, Status.QUEUE_FULL}
    elsewhere |= {Status.NO_DISPATCH}
    assert {status for _, status in DAMAGED.values()} | elsewhere == set(Status)


FUZZ = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LIKELY = st.one_of(st.integers(0, 40), st.sampled_from([65535, 65536, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))


@FUZZ
@given(
    changes=st.lists(st.tuples(st.integers(0, HEADER_WORDS - 1), LIKELY), min_size=1, max_size=4), repair=st.booleans()
)
def test_any_header(controller: Controller, changes: list[tuple[int, int]], repair: bool) -> None:
    """Random header words: both readers give the same status, and the controller ends."""
    data = GOOD
    for word, value in changes:
        data = changed(data, word, value, repair=repair)
    for layer in range(4):
        controller.agreed(data, call_for(0b011, layer=layer, held=layer))


@FUZZ
@given(
    word=st.integers(HEADER_WORDS, len(GOOD) // 4 - 1), value=LIKELY, repair=st.booleans(), register=st.integers(0, 7)
)
def test_any_word_after_the_header(controller: Controller, word: int, value: int, repair: bool, register: int) -> None:
    """Thresholds, factors and prefetch sizes may be anything, NaN and infinities too."""
    data = changed(GOOD, word, value, repair=repair)
    for layer in range(4):
        controller.agreed(data, call_for(register, layer=layer, held=1))


@FUZZ
@given(data=st.binary(max_size=400), like_a_table=st.booleans())
def test_any_bytes(controller: Controller, data: bytes, like_a_table: bool) -> None:
    """Also such that pass the first checks: magic, version, length and CRC-32."""
    if like_a_table:
        data = bytes(-len(data) % 4) + data
        words = list(struct.unpack(f"<{len(data) // 4}I", data))
        data = repaired([MAGIC, VERSION, 0, len(words) + 4, *words])
    assert controller.agreed(data, call_for(0b101)).status is not Status.OK


def with_programs(rows: int, programs: list[list[int]]) -> bytes:
    """A table with these instruction words; header and CRC-32 fit them, whatever they are."""
    layers, stride = len(programs), len(programs[0])
    offsets = [HEADER_WORDS + i * layers for i in range(LAYER_FIELDS + 1)]
    first = offsets[-1]
    fields = [first + layers * stride, layers, rows, 2, 64, stride, 1, 0, 0xFFFFFFFF, 1, 1, 1, 1, 1, 1, 1, rows, rows]
    factor = 0x33800000  # 2^-24
    begins = [first + layer * stride for layer in range(layers)]
    body = [*[0] * layers, *[factor] * layers, *[96] * layers, *begins]
    body += [word for program in programs for word in program]
    return repaired([MAGIC, VERSION, 0, *fields, *offsets, *[0] * 6, *body])


LIKELY_WORDS = st.one_of(
    st.builds(lambda opcode, row: opcode << 24 | row << 16, st.sampled_from([2, 3]), st.integers(0, 7)),
    st.builds(lambda opcode: opcode << 24 | NONE << 16, st.sampled_from([1, 4, 5, 6])),
    st.integers(0, 2**32 - 1),
)


@FUZZ
@given(
    rows=st.integers(1, 8),
    program=st.lists(LIKELY_WORDS, min_size=1, max_size=20),
    register=st.integers(0, 255),
    capacity=st.integers(0, 20),
    held=st.sampled_from([None, 0, 1, 70000]),
)
def test_any_program(
    controller: Controller, rows: int, program: list[int], register: int, capacity: int, held: int | None
) -> None:
    """Instructions in any order, twice, after END, of rows that are not there; words that are none."""
    data = with_programs(rows, [program])
    controller.agreed(data, call_for(register & (1 << rows) - 1, rows, held=held), capacity)


def test_a_full_program_without_end(controller: Controller) -> None:
    """The longest program there is: 128 words; with END in the last one 127 records, else none."""
    barrier, end = Opcode.BARRIER << 24 | NONE << 16, Opcode.END << 24 | NONE << 16
    call = call_for(1, 1)
    assert controller.agreed(with_programs(1, [[barrier] * 128]), call).status is Status.BAD_INSTRUCTION
    trace = controller.agreed(with_programs(1, [[barrier] * 127 + [end]]), call)
    assert (trace.status, len(trace.records)) == (Status.OK, 127)
    assert CAPACITY > 127


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of build_table."""
    layers, rows, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 32)), draw(st.integers(1, 8))
    per_layer: Callable[[Any], Any] = lambda values: st.lists(values, min_size=layers, max_size=layers)  # noqa: E731
    return {
        "layers": layers,
        "rows": rows,
        "cores": draw(st.integers(1, 32)),
        "tokens_per_frame": draw(st.integers(1, 2**32 - 1)),
        "thresholds": draw(per_layer(st.floats(width=32, allow_nan=False))),
        "attention": AttentionShape(kv_heads * draw(st.integers(1, 4)), kv_heads, draw(st.integers(1, 256))),
        "scales": draw(per_layer(st.one_of(st.none(), st.floats(2.0**-10, 4)))),
        "max_chain": draw(st.one_of(st.none(), st.integers(1, 2**31 - 1))),
        "couple_cfg": rows % 2 == 0 and draw(st.booleans()),
        "prefetch": draw(per_layer(st.integers(0, 2**32 - 1))),
        "refresh_every": draw(st.one_of(st.none(), st.just(1))),
        "gate": draw(scores(layers, kv_heads)),
    }


def scores(layers: int, heads: int) -> st.SearchStrategy[GateScore]:
    """A score of every kind, TAS also over chosen heads."""
    units, widths, floats = st.integers(1, 64), st.integers(1, 300), st.floats(width=32, allow_nan=False)
    chosen = st.one_of(st.none(), st.lists(st.tuples(st.integers(0, heads - 1), floats), max_size=3).map(tuple))
    weighted = st.lists(chosen, min_size=layers, max_size=layers).map(tuple)
    return st.one_of(
        st.sampled_from([GateScore(GateKind[name]) for name in ("TAS", "ALWAYS", "NEVER", "RANDOM")]),
        st.builds(lambda heads: GateScore(heads=heads), weighted),
        st.builds(lambda width: GateScore(GateKind.INPUT_DELTA, width), widths),
        st.builds(lambda width, units: GateScore(GateKind.LEARNED, width, units), widths, units),
        st.builds(lambda width: GateScore(GateKind.BOUND, width, distance_weight=0.1), widths),
    )


@given(arguments=tables())
def test_round_trip(arguments: dict[str, Any]) -> None:
    table = build_table(**arguments)
    assert read_table(table.to_bytes()) == table
    assert table.thresholds == tuple(arguments["thresholds"])
    assert [f == 0 for f in table.factors] == [s is None for s in arguments["scales"]]
    changed_back = table.with_thresholds([7.0] * table.layers).with_thresholds(table.thresholds)
    assert changed_back.to_bytes() == table.to_bytes()


def test_json_twin() -> None:
    rest: dict[str, Any] = {"refresh_every": 2, "gate": GateScore(heads=(((0, 0.5),),))}
    table = build_table(*(1, 1, 1, 16, [INFINITY]), attention=ONE, scales=[2.0], max_chain=3, prefetch=[512], **rest)
    assert table.to_json() == {
        "version": 4,
        "layers": 1,
        "rows": 1,
        "cores": 1,
        "tokens_per_frame": 16,
        "gate": "tas",
        "units": 0,
        "input_words": 0,
        "distance_weight": 0.0,
        "couple_cfg": False,
        "max_chain": 3,
        "refresh_period": 32,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "thresholds": ["inf"],
        "factors": [2.0**-23],
        "prefetch_bytes": [512],
        "head_weights": [[0.5]],
        "instructions": [
            [
                {"opcode": "LOAD_WEIGHTS"},
                {"opcode": "COMPUTE_MLP", "row": 0},
                {"opcode": "REPLAY_COPY", "row": 0},
                {"opcode": "PREFETCH_NEXT"},
                {"opcode": "BARRIER"},
                {"opcode": "END"},
            ]
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 33, 0, 1, [0.0]), r"rows = 33 \(1 to 32\); cores = 0 \(1 to 32\); 1 thresholds for 2 layers"),
        ((1000, 32, 1, 1, [0.0] * 1000), r"72032 words \(at most 65536\)"),
    ],
)
def test_impossible_tables_are_refused_with_every_reason(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_table(*arguments)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_chain": 0}, r"max_chain = 0 \(1 to 2147483647\)"),
        ({"couple_cfg": True}, "coupled pairs of 3 rows"),
        ({"scales": [1.0]}, "1 scales for 2 layers"),
        ({"prefetch": [1, -1]}, "a prefetch size that is not 0 to 4294967295 bytes"),
        ({"attention": AttentionShape(6, 4, 8)}, "6 heads are no multiple of 4 kv_heads"),
        ({"attention": AttentionShape(1024, 4, 128)}, r"heads \* head_dim = 131072 \(at most 65536\)"),
        ({"refresh_every": 2**28}, r"a refresh every 4294967296 forwards \(16 to 4294967295\)"),
        ({"gate": GateScore(width=8)}, r"an input of 8 elements for gate tas \(1 to 65536 if read, else 0\)"),
        ({"gate": GateScore(GateKind.BOUND, 8)}, r"a distance weight of 0.0 for gate bound"),
        ({"gate": GateScore(GateKind.RANDOM, units=2)}, "a network of 2 units for gate random"),
        ({"gate": GateScore(GateKind.RANDOM, heads=(None, ()))}, "chosen heads for gate random"),
        ({"gate": GateScore(heads=(((1, 1.0),), None, None))}, "heads of 3 layers for 2 layers; head 1 of 1"),
        ({"attention": AttentionShape(0, 1, 0)}, r"heads = 0 \(1 to 65535\); head_dim = 0 \(1 to 65535\)"),
    ],
)
def test_impossible_gates_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_table(2, 3, 2, 16, [0.0, 0.0], **options)
