"""The control table: bytes, JSON twin, and a defined status for every damage, in both readers."""

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drs.tables import FRAME, LIMITS, ONE, Controller, call_for, changed, repaired, table_for
from fastcar_compile.codegen.hls.control_table.builder import GateScore, build_table
from fastcar_compile.codegen.hls.control_table.reader import Header, read_table
from fastcar_compile.codegen.hls.control_table.simulator import LayerTrace
from fastcar_compile.codegen.hls.control_table.table import (
    HEADER_WORDS,
    LAYER_FIELDS,
    MAGIC,
    VERSION,
    WEIGHTED,
    AttentionShape,
    TableStatus,
    table_words,
)
from fastcar_compile.errors import UserError
from fastcar_compile.gates.registry import GateKind

INFINITY = float("inf")
WORD = {name: i for i, name in enumerate(Header._fields)}
GOOD = table_for().to_bytes()
PAIRS = table_for(4, couple_cfg=True).to_bytes()
DEEP = table_for(attention=AttentionShape(1, 1, 4 * LIMITS.key_words + 1)).to_bytes()
"""A row of the key is one word longer than the hardware's buffer."""
WIDE = table_for(attention=AttentionShape(LIMITS.query_words + 1, 1, 4)).to_bytes()
"""A row of q is one word longer than the hardware's loop."""


OTHER = table_for(gate=GateScore(GateKind.INPUT_DELTA, 8)).to_bytes()
HEAVY = table_for(attention=AttentionShape(2, 1, 2), gate=GateScore(heads=(((1, 0.5),), None, None))).to_bytes()
MANY = table_for(attention=AttentionShape(LIMITS.heads + 1, 1, 1), gate=GateScore(heads=(((0, 1.0),),) * 3)).to_bytes()
"""One query head more has a weight than the hardware has room for."""


def header(field: str, value: int, data: bytes = GOOD) -> bytes:
    """`data` with one header field replaced, and the CRC-32 made to fit."""
    return changed(data, WORD[field], value)


DAMAGED: dict[str, tuple[bytes, TableStatus]] = {
    "empty": (b"", TableStatus.TOO_SHORT),
    "header cut": (GOOD[: 4 * HEADER_WORDS - 1], TableStatus.TOO_SHORT),
    "magic": (header("magic", 0x53524447), TableStatus.BAD_MAGIC),
    "version 8": (header("version", 8), TableStatus.BAD_VERSION),
    "version 12": (header("version", 12), TableStatus.BAD_VERSION),
    "one byte cut": (GOOD[:-1], TableStatus.BAD_LENGTH),
    "one byte more": (GOOD + b"\0", TableStatus.BAD_LENGTH),
    "one word more": (GOOD + bytes(4), TableStatus.BAD_LENGTH),
    "length field": (header("words", 0xFFFFFFFF), TableStatus.BAD_LENGTH),
    "longer than any": (header("words", len(GOOD) // 4 + 17 * 65536, GOOD + bytes(68 * 65536)), TableStatus.BAD_LENGTH),
    "longer than the hardware": (table_for(32, layers=2100).to_bytes(), TableStatus.BAD_LENGTH),
    "crc": (changed(GOOD, WORD["crc"], 0, repair=False), TableStatus.BAD_CRC),
    "flipped threshold": (changed(GOOD, HEADER_WORDS, 1, repair=False), TableStatus.BAD_CRC),
    "instructions of a controller": (header("instructions", 1), TableStatus.BAD_HEADER),
    "sizes without a program": (header("ports", 1), TableStatus.BAD_HEADER),
    "videos without a program": (header("videos", 1), TableStatus.BAD_HEADER),
    "no layers": (header("layers", 0), TableStatus.BAD_HEADER),
    "other layer count": (header("layers", 2), TableStatus.BAD_HEADER),
    "layer count that overflows": (header("layers", 0x80000000), TableStatus.BAD_HEADER),
    "no rows": (header("rows", 0), TableStatus.BAD_HEADER),
    "33 rows": (header("rows", 33), TableStatus.BAD_HEADER),
    "no cores": (header("cores", 0), TableStatus.BAD_HEADER),
    "33 cores": (header("cores", 33), TableStatus.BAD_HEADER),
    "cores of another array": (header("cores", 1), TableStatus.BAD_HEADER),
    "no tokens per frame": (header("tokens_per_frame", 0), TableStatus.BAD_HEADER),
    "gate 0": (header("gate", 0), TableStatus.BAD_HEADER),
    "gate of another kernel": (OTHER, TableStatus.BAD_HEADER),
    "gate that is not there": (header("gate", 4), TableStatus.BAD_HEADER),
    "unknown flag": (header("flags", 4, PAIRS), TableStatus.BAD_HEADER),
    "pairs of an odd batch": (header("flags", 1), TableStatus.BAD_HEADER),
    "max_chain 0": (header("max_chain", 0), TableStatus.BAD_HEADER),
    "max_chain negative": (header("max_chain", 0x80000000), TableStatus.BAD_HEADER),
    "no heads": (header("heads", 0), TableStatus.BAD_HEADER),
    "no key heads": (header("kv_heads", 0), TableStatus.BAD_HEADER),
    "no head_dim": (header("head_dim", 0), TableStatus.BAD_HEADER),
    "heads that are no multiple": (header("kv_heads", 2), TableStatus.BAD_HEADER),
    "too many products": (header("heads", 65535, header("head_dim", 2)), TableStatus.BAD_HEADER),
    "heads that overflow": (header("heads", 65536, header("head_dim", 65536)), TableStatus.BAD_HEADER),
    "key larger than the hardware": (DEEP, TableStatus.BAD_HEADER),
    "q larger than the hardware": (WIDE, TableStatus.BAD_HEADER),
    "group": (header("group", 2), TableStatus.BAD_HEADER),
    "group that overflows": (header("group", 0x10001), TableStatus.BAD_HEADER),
    "words of a head": (header("head_words", 2), TableStatus.BAD_HEADER),
    "words of a row of q": (header("row_query_words", 2), TableStatus.BAD_HEADER),
    "words of a row of the key": (header("row_key_words", 0), TableStatus.BAD_HEADER),
    "words of q": (header("query_words", 4), TableStatus.BAD_HEADER),
    "words of the key": (header("key_words", 2), TableStatus.BAD_HEADER),
    "units without a network": (header("units", 1), TableStatus.BAD_HEADER),
    "refresh within a frame": (header("refresh_period", FRAME - 1), TableStatus.BAD_HEADER),
    "head weights that are not said": (header("flags", 0, HEAVY), TableStatus.BAD_HEADER),
    "head weights that are not there": (header("flags", WEIGHTED), TableStatus.BAD_HEADER),
    "more weighted heads than the hardware": (MANY, TableStatus.BAD_HEADER),
}
OF_THE_HARDWARE = (
    *("cores of another array", "key larger than the hardware", "q larger than the hardware"),
    *("longer than the hardware", "gate of another kernel", "more weighted heads than the hardware"),
)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_table_has_a_defined_status(controller: Controller, name: str) -> None:
    """A reader of tables refuses what no hardware takes."""
    data, expected = DAMAGED[name]
    if name != "longer than any":
        assert controller.agreed(data, call_for(0b101)) == LayerTrace(expected)
    if name not in OF_THE_HARDWARE:
        with pytest.raises(UserError, match=f"the control table is not valid: {expected.name}"):
            read_table(data)


def test_a_table_of_an_older_version_says_both_versions() -> None:
    with pytest.raises(UserError, match=r"BAD_VERSION, its version is 9, and this program reads version 11") as caught:
        read_table(header("version", 9))
    assert caught.value.hint == "compile the model again"


def test_the_hardware_refuses_what_the_format_allows() -> None:
    for name in OF_THE_HARDWARE:
        assert read_table(DAMAGED[name][0]).rows >= 3


@pytest.mark.parametrize("layer", [3, 65535, 0xFFFFFFFF])
def test_a_layer_that_is_not_there(controller: Controller, layer: int) -> None:
    assert controller.agreed(GOOD, call_for(0, layer=layer)).status is TableStatus.BAD_LAYER


@pytest.mark.parametrize(("field", "extra"), [("query", 1), ("query", -1), ("key", 1), ("key", -3)])
def test_operands_of_another_size(controller: Controller, field: str, extra: int) -> None:
    call = call_for(0)
    words = np.zeros((len(call.query) + extra, 4), np.float32)
    assert controller.agreed(GOOD, replace(call, **{field: words})) == LayerTrace(TableStatus.BAD_OPERANDS)


def test_every_status_occurs() -> None:
    elsewhere = {TableStatus.OK, TableStatus.BAD_INSTRUCTION, TableStatus.BAD_LAYER, TableStatus.BAD_OPERANDS}
    assert {status for _, status in DAMAGED.values()} | elsewhere == set(TableStatus)


def test_a_table_of_the_limits_is_loaded(controller: Controller) -> None:
    """As many words as the hardware holds, to one layer."""
    layers = (LIMITS.table_words - HEADER_WORDS) // LAYER_FIELDS
    table = table_for(32, layers=layers)
    assert len(table.to_bytes()) // 4 <= LIMITS.table_words < table_words(layers + 1)
    controller.agreed(table, call_for(0b1, 32, layers - 1))


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
        controller.agreed(data, call_for(0b011, layer=layer))


@FUZZ
@given(
    word=st.integers(HEADER_WORDS, len(GOOD) // 4 - 1), value=LIKELY, repair=st.booleans(), register=st.integers(0, 7)
)
def test_any_word_after_the_header(controller: Controller, word: int, value: int, repair: bool, register: int) -> None:
    """Thresholds and factors may be anything, NaN and infinities too."""
    data = changed(GOOD, word, value, repair=repair)
    for layer in range(4):
        controller.agreed(data, call_for(register, layer=layer))


@FUZZ
@given(data=st.binary(max_size=400), like_a_table=st.booleans())
def test_any_bytes(controller: Controller, data: bytes, like_a_table: bool) -> None:
    """Also such that pass the first checks: magic, version, length and CRC-32."""
    if like_a_table:
        data = bytes(-len(data) % 4) + data
        words = list(struct.unpack(f"<{len(data) // 4}I", data))
        data = repaired([MAGIC, VERSION, 0, len(words) + 4, *words])
    assert controller.agreed(data, call_for(0b101)).status is not TableStatus.OK


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
        "refresh_every": draw(st.one_of(st.none(), st.just(1))),
        "gate": draw(scores(layers, kv_heads)),
    }


def scores(layers: int, heads: int) -> st.SearchStrategy[GateScore]:
    """A score of every kind, TAS also over chosen heads."""
    units, widths, floats = st.integers(1, 64), st.integers(1, 300), st.floats(width=32, allow_nan=False)
    chosen = st.one_of(st.none(), st.lists(st.tuples(st.integers(0, heads - 1), floats), max_size=3).map(tuple))
    weighted = st.lists(chosen, min_size=layers, max_size=layers).map(tuple)
    return st.one_of(
        st.just(GateScore()),
        st.builds(lambda heads: GateScore(heads=heads), weighted),
        st.builds(lambda width: GateScore(GateKind.INPUT_DELTA, width), widths),
        st.builds(lambda width, units: GateScore(GateKind.LEARNED, width, units), widths, units),
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
    table = build_table(*(1, 1, 1, 16, [INFINITY]), attention=ONE, scales=[2.0], max_chain=3, **rest)
    sizes = {"version": 11, "layers": 1, "rows": 1, "cores": 1, "tokens_per_frame": 16}
    heads = {"heads": 1, "kv_heads": 1, "head_dim": 1, "head_weights": [[0.5]]}
    gate = {"gate": "tas", "units": 0, "input_words": 0}
    rules = {"couple_cfg": False, "max_chain": 3, "refresh_period": 32, "thresholds": ["inf"], "factors": [2.0**-23]}
    assert table.to_json() == sizes | heads | gate | rules


SIZES = (2, 3, 2, 16, [0.0, 0.0])


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ((2, 33, 0, 1, [0.0]), {}, r"rows = 33 \(1 to 32\); cores = 0 \(1 to 32\); 1 thresholds for 2 layers"),
        ((40000, 32, 1, 1, [0.0] * 40000), {}, r"80036 words \(at most 65536\)"),
        (SIZES, {"max_chain": 0}, r"max_chain = 0 \(1 to 2147483647\)"),
        (SIZES, {"couple_cfg": True}, "coupled pairs of 3 rows"),
        (SIZES, {"scales": [1.0]}, "1 scales for 2 layers"),
        (SIZES, {"attention": AttentionShape(6, 4, 8)}, "6 heads are no multiple of 4 kv_heads"),
        (SIZES, {"attention": AttentionShape(1024, 4, 128)}, r"heads \* head_dim = 131072 \(at most 65536\)"),
        (SIZES, {"refresh_every": 2**28}, r"a refresh every 4294967296 forwards \(16 to 4294967295\)"),
        (SIZES, {"gate": GateScore(width=8)}, r"an input of 8 elements for gate tas \(1 to 65536 if read, else 0\)"),
        (SIZES, {"gate": GateScore(GateKind.INPUT_DELTA, 8, units=2)}, "a network of 2 units for gate input_delta"),
        (SIZES, {"gate": GateScore(units=2)}, "a network of 2 units for gate tas"),
        (SIZES, {"gate": GateScore(GateKind.LEARNED, 8)}, "a network of 0 units for gate learned"),
        (SIZES, {"gate": GateScore(GateKind.INPUT_DELTA, 8, heads=(None, ()))}, "chosen heads for gate input_delta"),
        (SIZES, {"gate": GateScore(heads=(((1, 1.0),), None, None))}, "heads of 3 layers for 2 layers; head 1 of 1"),
        (SIZES, {"attention": AttentionShape(0, 1, 0)}, r"heads = 0 \(1 to 65535\); head_dim = 0 \(1 to 65535\)"),
    ],
)
def test_impossible_tables_are_refused_with_every_reason(
    sizes: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError, match=text):
        build_table(*sizes, **options)
