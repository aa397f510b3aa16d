"""The control table: bytes, JSON twin, and a defined status for every damage, in both readers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drs.tables import FRAME, LIMITS, ONE, Controller, call_for, changed, table_for
from fastcar_compile.codegen.hls.control_table.builder import GateScore, build_table
from fastcar_compile.codegen.hls.control_table.reader import Header, read_table
from fastcar_compile.codegen.hls.control_table.simulator import LayerTrace
from fastcar_compile.codegen.hls.control_table.table import (
    HEADER_WORDS,
    LAYER_FIELDS,
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
    "length field": (header("words", 0xFFFFFFFF), TableStatus.BAD_LENGTH),
    "longer than any": (header("words", len(GOOD) // 4 + 17 * 65536, GOOD + bytes(68 * 65536)), TableStatus.BAD_LENGTH),
    "longer than the hardware": (table_for(32, layers=2100).to_bytes(), TableStatus.BAD_LENGTH),
    "crc": (changed(GOOD, WORD["crc"], 0, repair=False), TableStatus.BAD_CRC),
    "instructions of a controller": (header("instructions", 1), TableStatus.BAD_HEADER),
    "sizes without a program": (header("ports", 1), TableStatus.BAD_HEADER),
    "videos without a program": (header("videos", 1), TableStatus.BAD_HEADER),
    "no layers": (header("layers", 0), TableStatus.BAD_HEADER),
    "other layer count": (header("layers", 2), TableStatus.BAD_HEADER),
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
    "words of a head": (header("head_words", 2), TableStatus.BAD_HEADER),
    "words of a row of q": (header("row_query_words", 2), TableStatus.BAD_HEADER),
    "words of a row of the key": (header("row_key_words", 0), TableStatus.BAD_HEADER),
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


@pytest.mark.parametrize(
    "options",
    [
        {"couple_cfg": True, "max_chain": 2**31 - 1, "refresh_every": 2**25},
        {"attention": AttentionShape(12, 4, 250), "gate": GateScore(heads=(((3, 0.5),), None, ((0, -2.0), (11, 1.0))))},
        {"gate": GateScore(GateKind.INPUT_DELTA, 300), "scales": [None, 2.0**-10, None]},
        {"gate": GateScore(GateKind.LEARNED, 17, 64), "max_chain": 1},
    ],
    ids=["rules", "heads", "input_delta", "learned"],
)
def test_round_trip(options: dict[str, Any]) -> None:
    """Also with other thresholds in between."""
    limits, scales = (0.75, -INFINITY, -3.4e38), options.get("scales", [1.0] * 3)
    table = table_for(32, **options).with_thresholds(limits)
    assert read_table(table.to_bytes()) == table
    assert table.thresholds == tuple(float(np.float32(limit)) for limit in limits)
    assert [factor == 0 for factor in table.factors] == [scale is None for scale in scales]
    changed_back = table.with_thresholds([7.0] * 3).with_thresholds(table.thresholds)
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
        (SIZES, {"attention": AttentionShape(6, 4, 8)}, "6 heads are no multiple of 4 kv_heads"),
        (SIZES, {"refresh_every": 2**28}, r"a refresh every 4294967296 forwards \(16 to 4294967295\)"),
        (SIZES, {"gate": GateScore(width=8)}, r"an input of 8 elements for gate tas \(1 to 65536 if read, else 0\)"),
        (SIZES, {"gate": GateScore(GateKind.INPUT_DELTA, 8, units=2)}, "a network of 2 units for gate input_delta"),
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
