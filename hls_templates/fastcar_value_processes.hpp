// The DATAFLOW processes of attention behind the softmax: from numerators to rows on chip (fastcar_attention_processes.hpp).
#pragma once

#include "fastcar_attention_processes.hpp"

namespace fastcar {
namespace attention {

// Elements of the FIFOs.
template <int HEADS>
struct ScaledWeights {
    float weight[HEADS][FLOAT_LANES];
};

template <int HEADS, int SHARE>
struct LargestWeights {
    uint32_t largest[HEADS];
    bool unknown[SHARE];  // a position that the row sees has a NaN in this block
};

template <int HEADS, int SHARE>
struct WeightScales {
    int8_t exponent[HEADS];
    bool unknown[SHARE];
};

// The weights of the tiles: numerators times 2^e of the values' exponents, four positions of every head per iteration. `tiles`:
// tiles of all units; `head`: words of exponents of a tile on a port; then the blocks, eight iterations each. The numerators of a
// tile come in the iterations of the first block and stay.
template <int HEADS, int SHARE, int PORTS, int BLOCKS>
void weigh_values(hls::stream<word_t> exponents[PORTS], hls::stream<Numerators<HEADS, SHARE> >& numerators, uint32_t tiles,
                  uint32_t head, uint32_t blocks, hls::stream<ScaledWeights<HEADS> >& out_weights,
                  hls::stream<LargestWeights<HEADS, SHARE> >& out_largest) {
    FASTCAR_NO_INLINE
    const uint32_t steps = head + blocks * QUADS, count = tiles * steps;
    word_t words[PORTS][cache::ValueTile<BLOCKS, PORTS>::HEAD];
    FASTCAR_PARTITION(words, 0)
    Numerators<HEADS, SHARE> kept[QUADS];
    FASTCAR_AGGREGATE(kept)
    LargestWeights<HEADS, SHARE> largest;
    FASTCAR_AGGREGATE(largest)
    uint32_t i = 0;  // of the tile
scale_weights:
    for (uint32_t n = 0; n < count; ++n) {
        FASTCAR_PIPELINE(FASTCAR_VALUE_INTERVAL)
        FASTCAR_TRIPS(9, MOST_CACHE_WORDS)
        FASTCAR_RECURRENCE(largest, 1)
        const bool is_head = i < head;
        const uint32_t place = is_head ? 0 : i - head;
        const uint32_t quad = place % QUADS;
        const uint32_t number = place / FLOAT_LANES;  // number of the word of exponents
        if (is_head) {
            for (int p = 0; p < PORTS; ++p) {
                words[p][i] = exponents[p].read();
            }
        }
        Numerators<HEADS, SHARE> now = {};
        if (!is_head && place < QUADS) {
            now = numerators.read();
            kept[quad] = now;
        } else if (!is_head) {
            now = kept[quad];
        }
        int8_t lanes[INT8_LANES];
        int8_t exponent[FLOAT_LANES];
        FASTCAR_PARTITION(lanes, 0)
        FASTCAR_PARTITION(exponent, 0)
        unpack_int8(words[number % PORTS][number / PORTS], lanes);
        for (int c = 0; c < FLOAT_LANES; ++c) {
            exponent[c] = lanes[quad % FLOAT_LANES * FLOAT_LANES + c];
        }
        ScaledWeights<HEADS> scaled;
        FASTCAR_AGGREGATE(scaled)
        for (int b = 0; b < SHARE; ++b) {
            bool unknown = quad != 0 && largest.unknown[b];
            for (int c = 0; c < FLOAT_LANES; ++c) {
                unknown = unknown || (now.seen[b][c] && exponent[c] == cache::BLOCK_OF_NAN);
            }
            largest.unknown[b] = unknown;
        }
        for (int h = 0; h < HEADS; ++h) {
            largest.largest[h] = weigh_step(now.numerator[h], exponent, now.seen[h / (HEADS / SHARE)],
                                            quad == 0 ? 0u : largest.largest[h], scaled.weight[h]);
        }
        if (!is_head) out_weights.write(scaled);
        if (!is_head && quad == QUADS - 1) out_largest.write(largest);
        i = i + 1 == steps ? 0 : i + 1;
    }
}

// Weights as blocks of 15-bit mantissas; a block's exponent is known when its eight groups of four wait in their FIFO.
template <int HEADS, int SHARE>
void split_weights(hls::stream<ScaledWeights<HEADS> >& weights, hls::stream<LargestWeights<HEADS, SHARE> >& largest,
                   uint32_t count, hls::stream<LimbWords<HEADS> >& out_limbs, hls::stream<WeightScales<HEADS, SHARE> >& out_scales) {
    FASTCAR_NO_INLINE
    WeightScales<HEADS, SHARE> scales;
    FASTCAR_AGGREGATE(scales)
    int8_t lanes[LIMBS * HEADS][INT8_LANES];
    FASTCAR_PARTITION(lanes, 0)
split_groups:
    for (uint32_t i = 0; i < count; ++i) {
        FASTCAR_PIPELINE(FASTCAR_VALUE_INTERVAL)
        FASTCAR_TRIPS(8, MOST_CACHE_WORDS)
        if (i % QUADS == 0) {
            const LargestWeights<HEADS, SHARE> now = largest.read();
            for (int b = 0; b < SHARE; ++b) {
                scales.unknown[b] = now.unknown[b];
            }
            for (int h = 0; h < HEADS; ++h) {
                scales.exponent[h] = wide_exponent(now.largest[h]);
            }
            out_scales.write(scales);
        }
        const ScaledWeights<HEADS> own = weights.read();
        const uint32_t lane = i % FLOAT_LANES * FLOAT_LANES;
        LimbWords<HEADS> limbs;
        FASTCAR_AGGREGATE(limbs)
        for (int h = 0; h < HEADS; ++h) {
            for (int c = 0; c < FLOAT_LANES; ++c) {
                const Limbs pair = wide_limbs(own.weight[h][c], scales.exponent[h]);
                lanes[LIMBS * h][lane + c] = pair.high;
                lanes[LIMBS * h + 1][lane + c] = pair.low;
            }
            limbs.word[LIMBS * h] = pack_int8(lanes[LIMBS * h]);
            limbs.word[LIMBS * h + 1] = pack_int8(lanes[LIMBS * h + 1]);
        }
        if (i % FLOAT_LANES == FLOAT_LANES - 1) out_limbs.write(limbs);
    }
}

// Accumulators of a unit's elements, all ports and heads in parallel, an element of each per iteration, which has
// the clocks of its words; then its heads -> its row. `turns` of a tile are at least TURNS; `steps`: of all tiles of a unit.
template <int HEADS, int SHARE, int PORTS, int BLOCKS, int TURNS, int ROWS, int ROW_WORDS>
void add_values(hls::stream<BlockSums<HEADS, PORTS, 1> >& sums, hls::stream<WeightScales<HEADS, SHARE> >& scales,
                hls::stream<Inverses<HEADS> >& inverses, uint32_t row, uint32_t present, uint32_t key_heads, uint32_t runs, uint32_t group,
                uint32_t blocks, uint32_t turns, uint32_t steps, word_t y[ROWS][ROW_WORDS]) {
    FASTCAR_NO_INLINE
    typedef Totals<BLOCKS, PORTS, TURNS> Sizes;
    const uint32_t elements = blocks * Sizes::SLOTS;
    const uint32_t words = blocks * cache::BLOCK_FLOAT_WORDS;
    float total[HEADS][PORTS][Sizes::ENTRIES];
    FASTCAR_PARTITION(total, 1)
    FASTCAR_PARTITION(total, 2)
    uint32_t first = 0;
units_of_a_head:
    for (uint32_t head = 0; head < key_heads; ++head) {
        FASTCAR_TRIPS(1, MOST_UNITS)
    runs:
        for (uint32_t run = 0; run < runs; ++run) {
            FASTCAR_TRIPS(1, 64)
            uint32_t unknown[SHARE] = {};
            FASTCAR_PARTITION(unknown, 0)
            uint32_t turn = 0;
            uint32_t slot = 0;
            uint32_t block = 0;
            bool fresh = true;
            WeightScales<HEADS, SHARE> scale;
            FASTCAR_AGGREGATE(scale)
        add_sums:
            for (uint32_t i = 0; i < steps; ++i) {
                FASTCAR_PIPELINE(FASTCAR_TOTAL_INTERVAL)
                FASTCAR_TRIPS(TURNS, MOST_CACHE_WORDS)
                FASTCAR_RECURRENCE(total, FASTCAR_TOTAL_TURNS)
                const bool real = turn < elements;
                if (real && slot == 0) {
                    scale = scales.read();
                    for (int b = 0; b < SHARE; ++b) {
                        unknown[b] |= (scale.unknown[b] ? 1u : 0u) << block;
                    }
                }
                BlockSums<HEADS, PORTS, 1> own;
                FASTCAR_AGGREGATE(own)
                if (real) own = sums.read();
                for (int h = 0; h < HEADS; ++h) {
                    const float size = gate::power_of_two(scale.exponent[h]);
                    for (int p = 0; p < PORTS; ++p) {
                        const float part = real ? static_cast<float>(own.sum[h][p][0]) * size : 0.0f;
                        total[h][p][turn] = fresh ? 0.0f + part : total[h][p][turn] + part;
                    }
                }
                const bool last_slot = slot + 1 == Sizes::SLOTS;
                const bool last_turn = turn + 1 == turns;
                fresh = fresh && !last_turn;
                slot = last_slot || last_turn ? 0 : slot + 1;
                block = last_turn ? 0 : last_slot ? block + 1 : block;
                turn = last_turn ? 0 : turn + 1;
            }
            const Inverses<HEADS> inverse = inverses.read();
            uint32_t at = first;
        finish_heads:
            for (uint32_t h = 0; h < HEADS; ++h) {
                const uint32_t member = run * (HEADS / SHARE) + h % (HEADS / SHARE), b = h / (HEADS / SHARE);
                const uint32_t count = member < group ? words : 0u;
                at = h % (HEADS / SHARE) == 0 ? first : at;
                finish_head<HEADS, PORTS, BLOCKS, TURNS, ROW_WORDS>(total, h, unknown[b], inverse.inverse[h], at,
                                                                    row_computes(present, b) ? count : 0u, y[row + b]);
                at += count;
            }
            first = at;
        }
    }
}

}  // namespace attention
}  // namespace fastcar
