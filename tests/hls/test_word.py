"""How hardware takes a memory word apart."""

from pathlib import Path

from hls.test_project import run_program

PROGRAM = """
#include <stdio.h>
#include "fastcar_word.hpp"
int main() {
    fastcar::word_t word = 0;
    for (int i = 0; i < 16; ++i) word.range(8 * i + 7, 8 * i) = (37 * i + 200) % 256;
    int8_t lanes[16];
    fastcar::unpack_int8(word, lanes);
    for (int i = 0; i < 16; ++i) printf("%d ", lanes[i]);
    printf("%d ", fastcar::pack_int8(lanes) == word ? 1 : 0);
    float in[4] = {1.5f, -0.0f, 1e-40f, -3e38f};
    const fastcar::word_t packed = fastcar::pack_float(in);
    for (int i = 0; i < 4; ++i) {
        printf("%08x %08x ", packed.range(32 * i + 31, 32 * i).to_uint(),
               fastcar::bits_of_float(fastcar::unpack_float(packed, i)));
    }
    return 0;
}
"""
BITS = ("3fc00000", "80000000", "000116c2", "ff61b1e6")
EXPECTED = [str((37 * i + 200 + 128) % 256 - 128) for i in range(16)] + ["1"] + [b for b in BITS for _ in range(2)]


def test_lanes_are_little_endian(csim_tools: None, tmp_path: Path) -> None:
    """By ranges, as hardware has them; every C simulation takes words apart by bytes."""
    assert run_program(PROGRAM, tmp_path, "-DFASTCAR_WORD_BY_RANGE").decode().split() == EXPECTED
