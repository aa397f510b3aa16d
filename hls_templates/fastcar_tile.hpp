// One tile of a matrix product: multiply, then scale. Plain functions over words and arrays, no streams.
//
// A product is N output channels by K inputs. Channel c = (t * tile + j) * PORTS + p is row j of tile t on weight port p,
// so a tile is `tile` rows on every port. Before its rows a tile has its head: the scales, then (if the product has them)
// the float32 biases. S holds the largest sizes (fastcar_engine_core.hpp, Shapes), which are the sizes of the buffers.
//
// The tile stays where it is while `passes` go over it; in a pass every core multiplies one row. Bit pass * CORES + core
// of `occupied` is 1 where the pass has a row. Loops are flat, with counters instead of divisions: a pass costs no start.
#pragma once

#include <string.h>

#include "fastcar_mac.hpp"
#include "fastcar_numerics.hpp"

// Work that C simulation counts where it is done, with FASTCAR_COUNTERS: iterations of the MAC array and beats on the AXI
// ports of weights. Without the macro, and in hardware, nothing is left of it.
enum FastcarCounter { COUNT_MAC, COUNT_WEIGHT_BEATS, COUNTERS };
#if defined(FASTCAR_COUNTERS) && !defined(__SYNTHESIS__)
static uint64_t fastcar_counters[COUNTERS];
#define FASTCAR_COUNT(counter) ++fastcar_counters[counter];

// Copies what was counted since the last call, in the order of `FastcarCounter`, and starts again from zero.
extern "C" void fastcar_csim_counters(uint64_t* counts) {
    memcpy(counts, fastcar_counters, sizeof(fastcar_counters));
    memset(fastcar_counters, 0, sizeof(fastcar_counters));
}
#else
#define FASTCAR_COUNT(counter)
#endif

namespace fastcar {

// w8a8: 16 weights per word, one float32 scale per channel. w4a8: 32 weights per word, one float16 scale per group of 128.
template <int BITS>
struct WeightFormat {
    static const bool GROUPED = BITS == 4;
    static const int LANES = GROUPED ? INT4_LANES : INT8_LANES;
    static const int SCALE_LANES = GROUPED ? HALF_LANES : FLOAT_LANES;
    static const int GROUP = GROUPED ? 128 : 1 << 16;  // or a whole channel
    static void unpack(const word_t& word, int8_t lanes[LANES]) {
        FASTCAR_INLINE
        GROUPED ? unpack_int4(word, lanes) : unpack_int8(word, lanes);
    }
    static float unpack_scale(const word_t& word, int lane) {
        FASTCAR_INLINE
        return GROUPED ? unpack_half(word, lane) : unpack_float(word, lane);
    }
};

// One clock of the MAC array: one word of every port by one word of every core. `first`: a sum begins.
template <class S>
void mac_step(const word_t word[S::PORTS], const int8_t input[S::CORES][S::LANES], uint32_t busy, bool first,
              int32_t partial[S::CORES][S::PORTS]) {
    FASTCAR_INLINE
    int8_t weight[S::PORTS][S::LANES];
    int32_t product[S::CORES][S::PORTS] = {};
    FASTCAR_PARTITION(weight, 0)
    FASTCAR_PARTITION(product, 0)
    for (int p = 0; p < S::PORTS; ++p) {
        S::Format::unpack(word[p], weight[p]);
    }
    multiply_words<S::PORTS, S::CORES, S::LANES>(weight, input, busy, product);
    for (int c = 0; c < S::CORES; ++c) {
        for (int p = 0; p < S::PORTS; ++p) {
            partial[c][p] = (first ? 0 : partial[c][p]) + product[c][p];
        }
    }
}

// The MAC array: PORTS * LANES lanes for each core.
// words: `steps` = passes * tile_words, one word of every port per clock. A sum ends after sum_words words.
template <class S>
void mac_tile(const word_t tile[S::PORTS][S::TILE_WORDS],
              const int8_t q[S::CORES][S::PASSES * S::CHANNEL_WORDS][S::LANES], uint64_t occupied, int steps,
              int tile_words, int sum_words, int channel_words, int32_t acc[S::CORES][S::PORTS][S::SUMS]) {
    FASTCAR_NO_INLINE
    int32_t partial[S::CORES][S::PORTS];
    FASTCAR_PARTITION(partial, 0)
    uint64_t busy = occupied;
    int at = 0, k = 0, word = 0, sum = 0, base = 0;
words:
    for (int i = 0; i < steps; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, S::PASSES * S::TILE_WORDS)
        FASTCAR_RECURRENCE(partial, 1)
        FASTCAR_COUNT(COUNT_MAC)
        word_t weights[S::PORTS];
        int8_t input[S::CORES][S::LANES];
        FASTCAR_PARTITION(weights, 0)
        FASTCAR_PARTITION(input, 0)
        for (int p = 0; p < S::PORTS; ++p) {
            weights[p] = tile[p][at];
        }
        for (int c = 0; c < S::CORES; ++c) {
            store_lanes<S::LANES>(q[c][base + k], input[c]);
        }
        mac_step<S>(weights, input, static_cast<uint32_t>(busy), word == 0, partial);
        for (int c = 0; c < S::CORES; ++c) {
            for (int p = 0; p < S::PORTS; ++p) {
                acc[c][p][sum] = partial[c][p];
            }
        }
        const bool last_of_sum = word == sum_words - 1;
        const bool last_of_pass = at == tile_words - 1;
        word = last_of_sum ? 0 : word + 1;
        sum += last_of_sum ? 1 : 0;
        k = k == channel_words - 1 ? 0 : k + 1;
        at = last_of_pass ? 0 : at + 1;
        base += last_of_pass ? S::CHANNEL_WORDS : 0;
        busy = last_of_pass ? busy >> S::CORES : busy;
    }
}

// One sum: its value before the bias. Groups of a channel are added in ascending order, in `total`; the result of the last
// group is the channel's. Without groups no value is carried on.
template <class Format>
float scale_step(int32_t sum, float scale, float row_scale, bool first, float& total) {
    FASTCAR_INLINE
    if (!Format::GROUPED) return dequantize(sum, row_scale, scale);
    const float part = static_cast<float>(sum) * scale;
    total = first ? part : total + part;
    return total * row_scale;
}

// The place of scale_tile in its loop.
struct ScalePlace {
    int block;   // block of PORT_LANES ports
    int row;     // row of the tile
    int group;   // group of a channel
    int sum;     // first sum of the row
    int place;   // row * PORT_BLOCKS + block
    int pass;
    int sums;    // sums of the earlier passes
    int values;  // values of the earlier passes
};

// The next place; `rows` places of a row lie between two groups of a channel, and `tile` of these places are real.
template <class S>
ScalePlace next_place(const ScalePlace& now, int tile, int rows, int sums, int tile_sums) {
    FASTCAR_INLINE
    const bool block = now.block == S::PORT_BLOCKS - 1;
    const bool row = block && now.row == rows - 1;
    const bool group = row && now.group == sums - 1;
    ScalePlace next;
    next.block = block ? 0 : now.block + 1;
    next.row = row ? 0 : block ? now.row + 1 : now.row;
    next.group = group ? 0 : row ? now.group + 1 : now.group;
    next.sum = row ? 0 : block ? now.sum + sums : now.sum;
    next.place = row ? 0 : now.place + 1;
    next.pass = group ? now.pass + 1 : now.pass;
    next.sums = group ? now.sums + tile_sums : now.sums;
    next.values = group ? now.values + tile * S::PORT_BLOCKS : now.values;
    return next;
}

// Sums of a tile -> values, all cores in parallel.
// groups: `steps` = passes * sums * rows * PORT_BLOCKS: group, row of the tile, block of ports; PORT_LANES ports per clock.
// Two additions to a channel's sum are rows * PORT_BLOCKS >= FASTCAR_SCALE_DISTANCE clocks apart, which hides the adder's latency:
// a tile of fewer than SCALE_ROWS rows takes as many clocks as a tile of SCALE_ROWS.
template <class S>
void scale_tile(const word_t head[S::PORTS][S::HEAD_WORDS], const int32_t acc[S::CORES][S::PORTS][S::SUMS],
                const float row_scale[S::CORES][S::PASSES], uint64_t occupied, int steps, int tile, int rows, int sums,
                int tile_sums, int scale_words, bool bias, float value[S::CORES][S::PORT_LANES][S::VALUES]) {
    FASTCAR_NO_INLINE
    typedef typename S::Format Format;
    float total[S::CORES][S::PORT_LANES][S::TILE * S::PORT_BLOCKS];
    FASTCAR_PARTITION(total, 1)
    FASTCAR_PARTITION(total, 2)
    uint64_t busy = occupied;
    ScalePlace now = {0, 0, 0, 0, 0, 0, 0, 0};
groups:
    for (int i = 0; i < steps; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, S::PASSES * S::SCALE_STEPS)
        FASTCAR_RECURRENCE(total, FASTCAR_SCALE_DISTANCE)
        const int at = now.sum + now.group;
        for (int lane = 0; lane < S::PORT_LANES; ++lane) {
            const int p = now.block * S::PORT_LANES + lane;
            if (now.row < tile && p < S::PORTS) {
                const float scale = Format::unpack_scale(head[p][at / Format::SCALE_LANES], at % Format::SCALE_LANES);
                const word_t biases = bias ? head[p][scale_words + now.row / FLOAT_LANES] : word_t(0);
                const float add = unpack_float(biases, now.row % FLOAT_LANES);
                for (int c = 0; c < S::CORES; ++c) {
                    if (((busy >> c) & 1u) != 0) {
                        const float scaled = scale_step<Format>(acc[c][p][now.sums + at], scale, row_scale[c][now.pass],
                                                        now.group == 0, total[c][lane][now.place]);
                        value[c][lane][now.values + now.place] = bias ? scaled + add : scaled;
                    }
                }
            }
        }
        const ScalePlace next = next_place<S>(now, tile, rows, sums, tile_sums);
        busy = next.pass != now.pass ? busy >> S::CORES : busy;
        now = next;
    }
}

}  // namespace fastcar
