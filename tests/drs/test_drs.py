"""The DRS simulator against the HLS controller in C simulation, on good and on damaged tables."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.drs.simulator import DispatchRecord, map_rows, simulate
from fastcar_compile.codegen.drs.table import MAGIC, NONE, VERSION, DrsTable, Opcode, Status, build_table
from fastcar_compile.codegen.hls.csim import CsimLibrary
from fastcar_compile.errors import UserError

CORES = 8
"""Cores of the controller in these tests."""

INFINITY = float("inf")


@pytest.fixture
def library(csim_tools: None, build_once: Callable[[str], CsimLibrary]) -> CsimLibrary:
    """A controller for up to eight cores."""
    built = build_once("eight_rows_eight_cores")
    assert built.cores == CORES
    return built


def table_for(rows: int = 3, cores: int = 2, layers: int = 3) -> bytes:
    """A small good table."""
    return build_table(layers, rows, cores, 64, [0.5] * layers).to_bytes()


def changed(data: bytes, word: int, value: int, *, repair: bool = True) -> bytes:
    """`data` with one 32-bit word replaced and, unless told otherwise, the CRC-32 made to fit."""
    words = list(struct.unpack(f"<{len(data) // 4}I", data))
    words[word] = value
    body = struct.pack(f"<{len(words) - 3}I", *words[3:])
    if repair:
        words[2] = zlib.crc32(body)
    return struct.pack("<3I", *words[:3]) + body


def assert_agree(library: CsimLibrary, data: bytes, layer: int, register: int, capacity: int = 128) -> Status:
    """Both readers give the same records and status."""
    records, status = library.drs(data, layer, register, capacity)
    trace = simulate(data, layer, register, max_cores=CORES, capacity=capacity)
    assert (records, status) == (list(trace.records), trace.status)
    return status


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", range(1, 9))
def test_every_index_register_value(library: CsimLibrary, rows: int, cores: int) -> None:
    data = table_for(rows, cores)
    for register in range(1 << rows):
        assert assert_agree(library, data, register % 3, register) is Status.OK


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 32), cores=st.integers(1, CORES), layer=st.integers(0, 5), register=st.integers(0, 2**32 - 1)
)
def test_wide_batches(library: CsimLibrary, rows: int, cores: int, layer: int, register: int) -> None:
    expected = Status.OK if layer < 4 else Status.BAD_LAYER
    assert assert_agree(library, table_for(rows, cores, layers=4), layer, register) is expected


def test_what_is_dispatched() -> None:
    trace = simulate(build_table(2, 4, 2, 64, [0.5, INFINITY]), 1, 0b1101)
    assert trace.mapping == (0, 0, 1, 0)
    assert trace.records == (
        DispatchRecord(Opcode.LOAD_WEIGHTS, None, None),
        DispatchRecord(Opcode.COMPUTE_MLP, 0, 0),
        DispatchRecord(Opcode.COMPUTE_MLP, 2, 1),
        DispatchRecord(Opcode.COMPUTE_MLP, 3, 0),
        DispatchRecord(Opcode.REPLAY_COPY, 1, None),
        DispatchRecord(Opcode.BARRIER, None, None),
    )


def test_a_skipped_layer_loads_nothing_and_prefetches() -> None:
    trace = simulate(table_for(2), 0, 0b100)  # bits beyond the rows are ignored
    assert [r.opcode for r in trace.records] == [
        Opcode.REPLAY_COPY,
        Opcode.REPLAY_COPY,
        Opcode.PREFETCH_NEXT,
        Opcode.BARRIER,
    ]


@given(register=st.integers(0, 2**32 - 1), rows=st.integers(1, 32), cores=st.integers(1, 32))
def test_cores_are_filled_evenly(register: int, rows: int, cores: int) -> None:
    mapping = map_rows(register, rows, cores)
    used = [mapping[row] for row in range(rows) if register >> row & 1]
    assert used == [i % cores for i in range(len(used))]


GOOD = table_for()
FIRST_INSTRUCTION = 12 + 3
DAMAGED = {
    "empty": (b"", Status.TOO_SHORT),
    "header cut": (GOOD[:47], Status.TOO_SHORT),
    "magic": (changed(GOOD, 0, 0x53524447), Status.BAD_MAGIC),
    "version": (changed(GOOD, 1, 2), Status.BAD_VERSION),
    "one byte cut": (GOOD[:-1], Status.BAD_LENGTH),
    "one byte more": (GOOD + b"\0", Status.BAD_LENGTH),
    "one word more": (GOOD + bytes(4), Status.BAD_LENGTH),
    "length field": (changed(GOOD, 3, 0xFFFFFFFF), Status.BAD_LENGTH),
    "longer than any table": (
        changed(GOOD + bytes(4 * 65536), 3, len(GOOD) // 4 + 65536),
        Status.BAD_LENGTH,
    ),
    "crc": (changed(GOOD, 2, 0, repair=False), Status.BAD_CRC),
    "flipped threshold": (changed(GOOD, 12, 1, repair=False), Status.BAD_CRC),
    "no layers": (changed(GOOD, 4, 0), Status.BAD_HEADER),
    "other layer count": (changed(GOOD, 4, 2), Status.BAD_HEADER),
    "layer count that overflows": (changed(GOOD, 4, 0x80000000), Status.BAD_HEADER),
    "no rows": (changed(GOOD, 5, 0), Status.BAD_HEADER),
    "33 rows": (changed(GOOD, 5, 33), Status.BAD_HEADER),
    "no cores": (changed(GOOD, 6, 0), Status.BAD_HEADER),
    "more cores than the hardware": (changed(GOOD, 6, CORES + 1), Status.BAD_HEADER),
    "no tokens per frame": (changed(GOOD, 7, 0), Status.BAD_HEADER),
    "stride": (changed(GOOD, 8, 9), Status.BAD_HEADER),
    "stride above the limit": (changed(GOOD, 8, 129), Status.BAD_HEADER),
    "thresholds offset": (changed(GOOD, 9, 13), Status.BAD_HEADER),
    "instructions offset": (changed(GOOD, 10, 0), Status.BAD_HEADER),
    "reserved": (changed(GOOD, 11, 1), Status.BAD_HEADER),
    "opcode 0": (changed(GOOD, FIRST_INSTRUCTION, 0x00FF0000), Status.BAD_INSTRUCTION),
    "opcode 7": (changed(GOOD, FIRST_INSTRUCTION, 0x07FF0000), Status.BAD_INSTRUCTION),
    "row on a load": (changed(GOOD, FIRST_INSTRUCTION, 0x01000000), Status.BAD_INSTRUCTION),
    "row beyond the batch": (changed(GOOD, FIRST_INSTRUCTION + 1, 0x02030000), Status.BAD_INSTRUCTION),
    "compute without a row": (changed(GOOD, FIRST_INSTRUCTION + 1, 0x02FF0000), Status.BAD_INSTRUCTION),
    "word of another layer": (changed(GOOD, FIRST_INSTRUCTION, 0x01FF0001), Status.BAD_INSTRUCTION),
    "no end": (changed(GOOD, FIRST_INSTRUCTION + 9, 0x05FF0000), Status.BAD_INSTRUCTION),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_table_has_a_defined_status(library: CsimLibrary, name: str) -> None:
    data, expected = DAMAGED[name]
    for register in (0, 0b101, 0xFFFFFFFF):
        assert assert_agree(library, data, 0, register) is expected


@pytest.mark.parametrize("name", [n for n in DAMAGED if n != "more cores than the hardware"])
def test_a_damaged_table_is_refused(name: str) -> None:
    data, expected = DAMAGED[name]
    with pytest.raises(UserError, match=f"the DRS table is not valid: {expected.name}"):
        DrsTable.from_bytes(data)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(word=st.integers(0, len(GOOD) // 4 - 1), value=st.integers(0, 2**32 - 1), repair=st.booleans())
def test_any_one_word_replaced(library: CsimLibrary, word: int, value: int, repair: bool) -> None:
    data = changed(GOOD, word, value, repair=repair)
    for layer in range(4):
        assert_agree(library, data, layer, 0b011)


def with_programs(rows: int, programs: list[list[int]]) -> bytes:
    """A table with these instruction words; header and CRC-32 fit them, whatever they are."""
    layers, stride = len(programs), len(programs[0])
    header = [12 + layers * (1 + stride), layers, rows, 2, 64, stride, 12, 12 + layers, 0]
    words = [*header, *[0] * layers, *(word for program in programs for word in program)]
    body = struct.pack(f"<{len(words)}I", *words)
    return struct.pack("<3I", MAGIC, VERSION, zlib.crc32(body)) + body


LIKELY_WORDS = st.one_of(
    st.builds(lambda opcode, row: opcode << 24 | row << 16, st.sampled_from([2, 3]), st.integers(0, 7)),
    st.builds(lambda opcode: opcode << 24 | NONE << 16, st.sampled_from([1, 4, 5, 6])),
    st.integers(0, 2**32 - 1),
)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 8),
    program=st.lists(LIKELY_WORDS, min_size=1, max_size=20),
    register=st.integers(0, 255),
    capacity=st.integers(0, 20),
)
def test_any_program(library: CsimLibrary, rows: int, program: list[int], register: int, capacity: int) -> None:
    """Instructions in any order, twice, after END, of rows that are not there; words that are none."""
    assert_agree(library, with_programs(rows, [program]), 0, register, capacity)


def test_a_full_program_without_end(library: CsimLibrary) -> None:
    """The longest program there is: 128 words; with END in the last one 127 records, else none."""
    barrier, end = Opcode.BARRIER << 24 | NONE << 16, Opcode.END << 24 | NONE << 16
    assert assert_agree(library, with_programs(1, [[barrier] * 128]), 0, 1) is Status.BAD_INSTRUCTION
    data = with_programs(1, [[barrier] * 127 + [end]])
    assert assert_agree(library, data, 0, 1) is Status.OK
    assert len(library.drs(data, 0, 1)[0]) == 127


def test_every_status_occurs() -> None:
    elsewhere = {Status.OK, Status.BAD_LAYER, Status.QUEUE_FULL}  # test_wide_batches, test_a_full_queue_is_reported
    assert {status for _, status in DAMAGED.values()} | elsewhere == set(Status)


@pytest.mark.parametrize("capacity", range(7))
def test_a_full_queue_is_reported(library: CsimLibrary, capacity: int) -> None:
    status = assert_agree(library, GOOD, 0, 0b011, capacity)
    assert status is (Status.OK if capacity >= 5 else Status.QUEUE_FULL)


@given(
    rows=st.integers(1, 32),
    cores=st.integers(1, 32),
    tokens=st.integers(1, 2**32 - 1),
    thresholds=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)
def test_round_trip(rows: int, cores: int, tokens: int, thresholds: list[float]) -> None:
    table = build_table(len(thresholds), rows, cores, tokens, thresholds)
    assert DrsTable.from_bytes(table.to_bytes()) == table
    assert table.thresholds == tuple(thresholds)


def test_bytes_are_those_of_the_document() -> None:
    data = build_table(1, 1, 1, 16, [INFINITY]).to_bytes()
    assert data.hex(" ", -4) == (
        "46445253 01000000 6f5b077e 13000000 01000000 01000000 01000000 10000000 06000000 0c000000 0d000000 00000000 "
        "0000807f 0000ff01 00000002 00000003 0000ff04 0000ff05 0000ff06"
    )


def test_json_twin() -> None:
    assert build_table(1, 1, 1, 16, [INFINITY]).to_json() == {
        "version": 1,
        "layers": 1,
        "rows": 1,
        "cores": 1,
        "tokens_per_frame": 16,
        "thresholds": [None],
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


def test_impossible_tables_are_refused_with_every_reason() -> None:
    with pytest.raises(UserError, match=r"rows = 33 \(1 to 32\); cores = 0 \(1 to 32\); 1 thresholds for 2 layers"):
        build_table(2, 33, 0, 1, [0.0])
    with pytest.raises(UserError, match=r"69012 words \(at most 65536\)"):
        build_table(1000, 32, 1, 1, [0.0] * 1000)
