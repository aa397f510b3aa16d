// The DATAFLOW processes of attention, from the words of the cache to rows on chip; the processes behind the softmax are in
// fastcar_value_processes.hpp. Each runs freely over the units of SHARE rows of a video: a unit is a key head, and a run of query
// heads that share it, of each row. HEADS: all these side by side, row after row. The processes are joined by FIFOs and form no cycle: keys and values have
// multipliers of their own.
//
// read_cache > route_cache > multiply_blocks (keys) > scale_logits > soften > weigh_values > split_weights > multiply_blocks
// (values) > add_values. Keys of a unit come before the values of the unit before it, so that its softmax has the time of a
// unit's values. The softmax of unit u is done when the keys of unit u + 1 have passed, and its numerators wait in their FIFO,
// which has room for a head.
#pragma once

#include <hls_stream.h>

#include "fastcar_attention_core.hpp"

namespace fastcar {
namespace attention {

static const int MOST_UNITS = 1 << 16;
static const int MOST_CACHE_WORDS = 1 << 20;  // words of a head's cache
static const int QUADS = cache::TILE / FLOAT_LANES;

// Elements of the FIFOs.
template <int HEADS>
struct LimbWords {
    word_t word[LIMBS * HEADS];  // 16 elements of a block
};

template <int HEADS, int BLOCKS>
struct QueryScales {
    int8_t exponent[HEADS][BLOCKS];
};

template <int HEADS, int PORTS, int BLOCKS>
struct BlockSums {
    int32_t sum[HEADS][PORTS][BLOCKS];
};

template <int HEADS>
struct Logits {
    float logit[HEADS];
};

template <int HEADS, int SHARE>
struct Numerators {
    int32_t numerator[HEADS][FLOAT_LANES];
    bool seen[SHARE][FLOAT_LANES];
};

template <int HEADS>
struct Inverses {
    float inverse[HEADS];
};

// One AXI port: round t reads the keys of unit t and the values of unit t - 1; `turns` is one more than the units. The unit
// after `runs` units has the next head of the cache. first, step: place of a head's beats; length: beats that are filled.
template <int AXI_WORDS>
void read_cache(const typename Beat<AXI_WORDS>::Type* cache, int turns, uint32_t runs, uint32_t key_first, uint32_t key_step,
                uint32_t key_length, uint32_t value_first, uint32_t value_step, uint32_t value_length,
                hls::stream<typename Beat<AXI_WORDS>::Type>& out) {
    FASTCAR_NO_INLINE
    uint32_t key_at = key_first, key_run = 0;
    uint32_t value_at = value_first, value_run = 0;
turns:
    for (int turn = 0; turn < turns; ++turn) {
        FASTCAR_TRIPS(2, MOST_UNITS)
        const uint32_t keys = turn + 1 < turns ? key_length : 0;
        const uint32_t values = turn > 0 ? value_length : 0;
    read_keys:
        for (uint32_t i = 0; i < keys; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, MOST_CACHE_WORDS)
            out.write(cache[key_at + i]);
        }
    read_values:
        for (uint32_t i = 0; i < values; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, MOST_CACHE_WORDS)
            out.write(cache[value_at + i]);
        }
        key_run = key_run + 1 == runs ? 0 : key_run + 1;
        key_at += key_run == 0 ? key_step : 0u;
        value_run = turn == 0 || value_run + 1 == runs ? 0 : value_run + 1;
        value_at += turn > 0 && value_run == 0 ? value_step : 0u;
    }
}

// The words of every weight port: exponents and mantissas of keys, and of values. A tile begins with its exponents.
template <int PORTS, int AXI_WORDS>
void route_cache(hls::stream<typename Beat<AXI_WORDS>::Type> in[PORTS / AXI_WORDS], int turns, uint32_t key_length,
                 uint32_t key_head, uint32_t key_tile, uint32_t value_length, uint32_t value_head, uint32_t value_tile,
                 hls::stream<word_t> out_key_exponents[PORTS], hls::stream<word_t> out_keys[PORTS],
                 hls::stream<word_t> out_value_exponents[PORTS], hls::stream<word_t> out_values[PORTS]) {
    FASTCAR_NO_INLINE
turns:
    for (int turn = 0; turn < turns; ++turn) {
        FASTCAR_TRIPS(2, MOST_UNITS)
        const uint32_t keys = turn + 1 < turns ? key_length : 0;
        const uint32_t count = keys + (turn > 0 ? value_length : 0);
        uint32_t place = 0;  // word of the tile
    route_words:
        for (uint32_t i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(1, MOST_CACHE_WORDS)
            const bool key = i < keys;
            const bool head = place < (key ? key_head : value_head);
            for (int axi = 0; axi < PORTS / AXI_WORDS; ++axi) {
                const typename Beat<AXI_WORDS>::Type beat = in[axi].read();
                for (int index = 0; index < AXI_WORDS; ++index) {
                    const int p = axi * AXI_WORDS + index;
                    const word_t word = word_of_beat<AXI_WORDS>(beat, index);
                    if (key && head) {
                        out_key_exponents[p].write(word);
                    } else if (key) {
                        out_keys[p].write(word);
                    } else if (head) {
                        out_value_exponents[p].write(word);
                    } else {
                        out_values[p].write(word);
                    }
                }
            }
            place = place + 1 == (key ? key_tile : value_tile) ? 0 : place + 1;
        }
    }
}

// The query heads of every unit of rows from `row` on as limbs; `group` of them share a key head. Zeros are heads beyond the last run,
// and rows whose bit of `present` is 0.
template <int HEADS, int SHARE, int BLOCKS, int ROWS, int ROW_WORDS>
void split_queries(const word_t y[ROWS][ROW_WORDS], uint32_t row, uint32_t present, uint32_t key_heads, uint32_t runs, uint32_t group, uint32_t blocks, hls::stream<LimbWords<HEADS> >& out_limbs,
                   hls::stream<QueryScales<HEADS, BLOCKS> >& out_scales) {
    FASTCAR_NO_INLINE
    static const int WORDS = BLOCKS * cache::BLOCK_FLOAT_WORDS;
    const uint32_t words = blocks * cache::BLOCK_FLOAT_WORDS;
    uint32_t first = 0;
units_of_a_head:
    for (uint32_t head = 0; head < key_heads; ++head) {
        FASTCAR_TRIPS(1, MOST_UNITS)
    runs:
        for (uint32_t run = 0; run < runs; ++run) {
            FASTCAR_TRIPS(1, 64)
            int8_t input[BLOCKS * cache::BLOCK_WORDS][LIMBS * HEADS][INT8_LANES];
            FASTCAR_PARTITION(input, 2)
            FASTCAR_PARTITION(input, 3)
            int8_t exponents[HEADS][BLOCKS] = {};
            FASTCAR_PARTITION(exponents, 0)
            uint32_t at = first;
        heads:
            for (uint32_t h = 0; h < HEADS; ++h) {
                word_t own[WORDS];
                const uint32_t member = run * (HEADS / SHARE) + h % (HEADS / SHARE), b = h / (HEADS / SHARE);
                const bool real = member < group && row_computes(present, b);
                at = h % (HEADS / SHARE) == 0 ? first : at;
            copy_head:
                for (uint32_t i = 0; i < words; ++i) {
                    FASTCAR_PIPELINE(1)
                    FASTCAR_TRIPS(8, WORDS)
                    own[i] = real ? y[row + b][at + i] : word_t(0);
                }
                split_query<WORDS, HEADS, BLOCKS>(own, 0, blocks, h, input, exponents);
                at += member < group ? words : 0u;
            }
            first = at;
            QueryScales<HEADS, BLOCKS> scales;
            FASTCAR_AGGREGATE(scales)
        copy_exponents:
            for (int b = 0; b < BLOCKS; ++b) {
                FASTCAR_PIPELINE(1)
                for (int h = 0; h < HEADS; ++h) {
                    scales.exponent[h][b] = exponents[h][b];
                }
            }
            out_scales.write(scales);
        send_limbs:
            for (uint32_t i = 0; i < blocks * cache::BLOCK_WORDS; ++i) {
                FASTCAR_PIPELINE(1)
                FASTCAR_TRIPS(2, BLOCKS * cache::BLOCK_WORDS)
                LimbWords<HEADS> limbs;
                FASTCAR_AGGREGATE(limbs)
                for (int r = 0; r < LIMBS * HEADS; ++r) {
                    limbs.word[r] = pack_int8(input[i][r]);
                }
                out_limbs.write(limbs);
            }
        }
    }
}

// One array of multipliers: `words` words of every port per unit are multiplied by the limbs, a word of all ports per clock.
// For keys (`kept`) the limbs of a unit stay, and a row's blocks are sent together. For values the blocks of weights come one
// after the other.
template <int HEADS, int PORTS, int BLOCKS, int SENT>
void multiply_blocks(hls::stream<word_t> in[PORTS], hls::stream<LimbWords<HEADS> >& limbs, int units, uint32_t words,
                     uint32_t blocks, uint32_t turns, bool kept, hls::stream<BlockSums<HEADS, PORTS, SENT> >& out) {
    FASTCAR_NO_INLINE
    LimbWords<HEADS> input[BLOCKS * cache::BLOCK_WORDS];
    FASTCAR_AGGREGATE(input)
    int32_t partial[LIMBS * HEADS][PORTS];
    FASTCAR_PARTITION(partial, 0)
    BlockSums<HEADS, PORTS, SENT> sums;
    FASTCAR_AGGREGATE(sums)
units:
    for (int unit = 0; unit < units; ++unit) {
        FASTCAR_TRIPS(1, MOST_UNITS)
        BlockPlace now = {0, 0, 0, true};
    multiply_words:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(2, MOST_CACHE_WORDS)
            FASTCAR_RECURRENCE(partial, 1)
            FASTCAR_RECURRENCE(input, 2)
            const uint32_t at = now.block * cache::BLOCK_WORDS + now.half;
            LimbWords<HEADS> own = input[at];
            if (now.turn == 0 && (now.first_lap || !kept)) {
                own = limbs.read();
                input[at] = own;
            }
            word_t word[PORTS];
            int8_t factor[LIMBS * HEADS][INT8_LANES];
            int32_t sum[HEADS][PORTS];
            FASTCAR_PARTITION(word, 0)
            FASTCAR_PARTITION(factor, 0)
            FASTCAR_PARTITION(sum, 0)
            for (int p = 0; p < PORTS; ++p) {
                word[p] = in[p].read();
            }
            for (int r = 0; r < LIMBS * HEADS; ++r) {
                unpack_int8(own.word[r], factor[r]);
            }
            block_step<HEADS, PORTS>(word, factor, now.half == 0, partial, sum);
            const uint32_t place = kept ? now.block : 0;
            for (int h = 0; h < HEADS; ++h) {
                for (int p = 0; p < PORTS; ++p) {
                    sums.sum[h][p][place] = sum[h][p];
                }
            }
            if (now.half + 1 == cache::BLOCK_WORDS && (!kept || now.block + 1 == blocks)) out.write(sums);
            now = next_block(now, blocks, turns);
        }
    }
}

// A key per iteration, all heads in parallel, in the clocks in which the ports bring it: the PORTS keys of a row of the tile one after another, from the port on that has
// position 0 of the head (cache::port_of_key). `steps`: iterations of all tiles of a unit, for the words of exponents and the keys
// of each tile; keys behind `rows` are left out. begin: `turned` of the first head (cache::port_of_key).
template <int HEADS, int PORTS, int BLOCKS>
void scale_logits(hls::stream<word_t> exponents[PORTS], hls::stream<BlockSums<HEADS, PORTS, BLOCKS> >& sums,
                  hls::stream<QueryScales<HEADS, BLOCKS> >& scales, int units, uint32_t runs, uint32_t steps, uint32_t blocks,
                  uint32_t rows, uint32_t begin, float factor, hls::stream<Logits<HEADS> >& out) {
    FASTCAR_NO_INLINE
    uint32_t run = 0;
    uint32_t turned = begin;
    word_t head[PORTS][BLOCKS];
    FASTCAR_PARTITION(head, 0)
units:
    for (int unit = 0; unit < units; ++unit) {
        FASTCAR_TRIPS(1, MOST_UNITS)
        const QueryScales<HEADS, BLOCKS> query = scales.read();
        FASTCAR_AGGREGATE(query)
        BlockSums<HEADS, PORTS, BLOCKS> now;
        FASTCAR_AGGREGATE(now)
        uint32_t step = 0;  // of the tile
        uint32_t port = 0;
        uint32_t row = 0;
        uint32_t position = 0;
    scale_keys:
        for (uint32_t i = 0; i < steps; ++i) {
            FASTCAR_PIPELINE(FASTCAR_KEY_INTERVAL)
            FASTCAR_TRIPS(1, MOST_CACHE_WORDS)
            const bool is_key = step >= blocks;
            if (!is_key) {
                for (int p = 0; p < PORTS; ++p) {
                    head[p][step] = exponents[p].read();
                }
            }
            if (is_key && port == 0) now = sums.read();
            int8_t key[BLOCKS];
            FASTCAR_PARTITION(key, 0)
            const uint32_t own = cache::port_of_key<PORTS>(port, turned);
            for (int b = 0; b < BLOCKS; ++b) {
                int8_t lanes[INT8_LANES];
                FASTCAR_PARTITION(lanes, 0)
                unpack_int8(head[own][b], lanes);
                key[b] = lanes[row];
            }
            Logits<HEADS> logits;
            FASTCAR_AGGREGATE(logits)
            for (int h = 0; h < HEADS; ++h) {
                logits.logit[h] = logit_of<BLOCKS>(now.sum[h][own], query.exponent[h], key, blocks, factor);
            }
            if (is_key && position < rows) out.write(logits);
            const bool last_port = is_key && port + 1 == PORTS;
            const bool last_key = last_port && row + 1 == cache::KEY_ROWS;
            position += is_key ? 1u : 0u;
            port = is_key && !last_port ? port + 1 : 0;
            row = last_key ? 0 : last_port ? row + 1 : row;
            step = last_key ? 0 : step + 1;
        }
        const bool next = run + 1 == runs;
        run = next ? 0 : run + 1;
        turned = next ? cache::next_turn<PORTS>(turned) : turned;
    }
}

// Softmax of every unit: logits stay on chip until the largest is known. `padded`: the rows up to whole tiles of values.
// rows: filled ones for any row of the video. windows: what each of its rows sees.
template <int HEADS, int SHARE, int POSITIONS>
void soften(hls::stream<Logits<HEADS> >& logits, int units, uint32_t padded, uint32_t rows, const Window windows[SHARE],
            hls::stream<Numerators<HEADS, SHARE> >& out_numerators, hls::stream<Inverses<HEADS> >& out_inverses) {
    FASTCAR_NO_INLINE
    float kept[HEADS][POSITIONS];
    FASTCAR_PARTITION(kept, 1)
units:
    for (int unit = 0; unit < units; ++unit) {
        FASTCAR_TRIPS(1, MOST_UNITS)
        Largest found[HEADS];
        int64_t sum[HEADS];
        FASTCAR_PARTITION(found, 0)
        FASTCAR_PARTITION(sum, 0)
    begin_heads:
        for (int h = 0; h < HEADS; ++h) {
            FASTCAR_PIPELINE(1)
            const Largest least = {LEAST_ORDERED, false};
            found[h] = least;
            sum[h] = 0;
        }
    keep_logits:
        for (uint32_t i = 0; i < rows; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(1, POSITIONS)
            FASTCAR_RECURRENCE(found, 1)
            const Logits<HEADS> now = logits.read();
            bool shown[SHARE];
            FASTCAR_PARTITION(shown, 0)
            for (int b = 0; b < SHARE; ++b) {
                shown[b] = i < windows[b].rows && is_visible(windows[b], i);
            }
            for (int h = 0; h < HEADS; ++h) {
                kept[h][i] = now.logit[h];
                found[h] = larger_logit(found[h], now.logit[h], shown[h / (HEADS / SHARE)]);
            }
        }
        Numerators<HEADS, SHARE> quad;
        FASTCAR_AGGREGATE(quad)
    add_numerators:
        for (uint32_t i = 0; i < padded; ++i) {
            FASTCAR_PIPELINE(FASTCAR_SOFTEN_INTERVAL)
            FASTCAR_TRIPS(32, POSITIONS)
            FASTCAR_RECURRENCE(sum, 1)
            bool shown[SHARE];
            FASTCAR_PARTITION(shown, 0)
            for (int b = 0; b < SHARE; ++b) {
                shown[b] = i < windows[b].rows && is_visible(windows[b], i);
                quad.seen[b][i % FLOAT_LANES] = shown[b];
            }
            for (int h = 0; h < HEADS; ++h) {
                const bool seen = shown[h / (HEADS / SHARE)];
                const float difference = kept[h][i] - float_of_ordered(found[h].value);
                const int32_t numerator = seen ? numerator_of(seen ? difference : 0.0f) : 0;
                quad.numerator[h][i % FLOAT_LANES] = numerator;
                sum[h] += numerator;
            }
            if (i % FLOAT_LANES == FLOAT_LANES - 1) out_numerators.write(quad);
        }
        Inverses<HEADS> inverses;
        FASTCAR_AGGREGATE(inverses)
    invert:
        for (int h = 0; h < HEADS; ++h) {
            FASTCAR_PIPELINE(1)
            inverses.inverse[h] = inverse_of_sum(sum[h], found[h]);
        }
        out_inverses.write(inverses);
    }
}

}  // namespace attention
}  // namespace fastcar
