"""Two int8 products in one multiplier: every triple, and sums at their limits; and how a memory word is taken apart."""

from pathlib import Path

import pytest

from hls.test_project import run_program

PROGRAM = """
#include <stdio.h>
#include "fastcar_mac.hpp"
#include "fastcar_word.hpp"
static long wrong_triples() {
    long wrong = 0;
    for (int low = -128; low < 128; ++low) {
        for (int high = -128; high < 128; high += STEP) {
            for (int shared = -128; shared < 128; ++shared) {
                const fastcar::packed_sum_t product = fastcar::pack_pair(low, high) * fastcar::shared_t(shared);
                const fastcar::Pair pair = fastcar::split(product);
                wrong += pair.low != low * shared || pair.high != high * shared;
            }
        }
    }
    return wrong;
}
static uint32_t state = 1;
static int8_t draw(int most) {
    state = state * 1664525u + 1013904223u;
    const int kind = (state >> 8) % 4;
    const int drawn = static_cast<int>((state >> 10) % (2 * most + 1)) - most;
    return static_cast<int8_t>(kind == 0 ? most : kind == 1 ? -most : drawn);
}
template <int PORTS, int ROWS, int LANES>
long run(int weight_limit) {
    long wrong = 0;
    for (int trial = 0; trial < 2000; ++trial) {
        int8_t weight[PORTS][LANES], input[ROWS][LANES];
        int32_t got[ROWS][PORTS] = {};
        const bool extreme = trial < 4;
        for (int i = 0; i < PORTS * LANES; ++i) {
            (&weight[0][0])[i] = extreme ? (trial & 1 ? -weight_limit - 1 : weight_limit) : draw(weight_limit);
        }
        for (int i = 0; i < ROWS * LANES; ++i) (&input[0][0])[i] = extreme ? (trial & 2 ? -127 : 127) : draw(127);
        const uint32_t busy = extreme ? 0xFFu : static_cast<uint32_t>(trial);
        fastcar::multiply_words<PORTS, ROWS, LANES>(weight, input, busy, got);
        for (int r = 0; r < ROWS; ++r) {
            if ((busy >> r & 1u) == 0) continue;
            for (int p = 0; p < PORTS; ++p) {
                int want = 0;
                for (int i = 0; i < LANES; ++i) want += weight[p][i] * input[r][i];
                wrong += got[r][p] != want;
            }
        }
    }
    return wrong;
}
static void words() {
    fastcar::word_t word = 0;
    for (int i = 0; i < 16; ++i) word.range(8 * i + 7, 8 * i) = (37 * i + 200) % 256;
    int8_t lanes[16];
    fastcar::unpack_int8(word, lanes);
    for (int i = 0; i < 16; ++i) printf(" %d", lanes[i]);
    printf(" %d", fastcar::pack_int8(lanes) == word ? 1 : 0);
    float in[4] = {1.5f, -0.0f, 1e-40f, -3e38f};
    const fastcar::word_t packed = fastcar::pack_float(in);
    for (int i = 0; i < 4; ++i) {
        printf(" %08x %08x", packed.range(32 * i + 31, 32 * i).to_uint(),
               fastcar::bits_of_float(fastcar::unpack_float(packed, i)));
    }
}
int main() {
    printf("%ld %ld", wrong_triples(), run<1, 1, 16>(127) + run<1, 2, 16>(127) + run<1, 5, 32>(7) + run<2, 1, 16>(127) +
                                           run<4, 3, 16>(127) + run<8, 1, 32>(7) + run<4, 8, 32>(7));
    words();
    return 0;
}
"""
BITS = ("3fc00000", "80000000", "000116c2", "ff61b1e6")
WORDS = [str((37 * i + 200 + 128) % 256 - 128) for i in range(16)] + ["1"] + [b for b in BITS for _ in range(2)]
"""Lanes are little-endian, by ranges as hardware has them and by bytes."""


@pytest.mark.parametrize(("options", "step"), [((), 1), (("-DFASTCAR_WORD_BY_RANGE",), 17)], ids=["integers", "ap_int"])
def test_packed_products_are_exact(csim_tools: None, options: tuple[str, ...], step: int, tmp_path: Path) -> None:
    """All 2**24 triples with plain integers; with the hardware's ap_int, which is slow here, every 17th of one factor.

    Words at their limits: rows paired, ports paired and neither; eight of the largest products of either sign in a sum.
    """
    said = run_program(PROGRAM.replace("STEP", str(step)), tmp_path, *options)
    assert said.decode().split() == ["0", "0", *WORDS]
