// Attention of one key head over an int8 cache (docs/reference/numerics.md): plain functions over words, no streams.
//
// The array computes both products (fastcar_mac.hpp). A query, and the weights of 32 values, are blocks of 32 mantissas of 15
// bits with an exponent. A mantissa is two int8 limbs, which are two rows of the array and share the word of the cache: so a
// product of 15 by 8 bits takes one multiplier. The sums of 32 products are exact; scaled, they are added in the order of the
// definition.
#ifndef FASTCAR_ATTENTION_CORE_HPP
#define FASTCAR_ATTENTION_CORE_HPP

#include "fastcar_cache_core.hpp"
#include "fastcar_mac.hpp"
#include "fastcar_softmax_core.hpp"

namespace fastcar {
namespace attention {

static const int LIMB_BITS = 7;
static const int LIMBS = 2;  // rows of the array of one query head: the upper limb, the lower limb
static const uint32_t WIDE_CARRY = 1u << 9;
static const int WIDE_EXCESS = 140;

// ---- blocks of 15-bit mantissas

inline int8_t wide_exponent(uint32_t largest) {
    FASTCAR_INLINE
    const int exponent = static_cast<int>((largest + WIDE_CARRY) >> 23) - WIDE_EXCESS;
    const int limited = exponent > cache::LEAST_EXPONENT ? exponent : cache::LEAST_EXPONENT;
    return static_cast<int8_t>(largest > INFINITY_BITS ? cache::BLOCK_OF_NAN : limited);
}

struct Limbs {
    int8_t high;
    int8_t low;
};

// The mantissa of a value whose magnitude is limited, in a block of this exponent: |m| <= 16383.
inline Limbs wide_limbs(float value, int8_t exponent) {
    FASTCAR_INLINE
    const bool known = exponent != cache::BLOCK_OF_NAN;
    const int32_t mantissa = round_half_even(known ? value * gate::power_of_two(known ? -exponent : 0) : 0.0f);
    const Limbs limbs = {static_cast<int8_t>(mantissa >> LIMB_BITS), static_cast<int8_t>(mantissa & ((1 << LIMB_BITS) - 1))};
    return limbs;
}

inline float limited(uint32_t bits) {
    FASTCAR_INLINE
    return float_of_bits((bits & gate::SIGN) | cache::stored_magnitude(bits));
}

// Query head `head` of those that share the key head: `blocks` blocks of float32 from word `first` on -> limbs in words of 16,
// and the exponents of its blocks.
template <int WORDS, int HEADS, int BLOCKS>
void split_query(const word_t row[WORDS], uint32_t first, uint32_t blocks, uint32_t head,
                 int8_t input[BLOCKS * cache::BLOCK_WORDS][LIMBS * HEADS][INT8_LANES], int8_t exponents[HEADS][BLOCKS]) {
    FASTCAR_NO_INLINE
    const uint32_t words = blocks * cache::BLOCK_FLOAT_WORDS;
    uint32_t largest = 0;
find_query_exponents:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(8, BLOCKS * cache::BLOCK_FLOAT_WORDS)
        largest = cache::largest_step(i % cache::BLOCK_FLOAT_WORDS == 0 ? 0 : largest, row[first + i]);
        exponents[head][i / cache::BLOCK_FLOAT_WORDS] = wide_exponent(largest);
    }
split_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(8, BLOCKS * cache::BLOCK_FLOAT_WORDS)
        const word_t word = row[first + i];
        const uint32_t lane = i % FLOAT_LANES * FLOAT_LANES;
        FASTCAR_UNROLL
        for (int c = 0; c < FLOAT_LANES; ++c) {
            const Limbs limbs = wide_limbs(limited(lane_bits(word, c)), exponents[head][i / cache::BLOCK_FLOAT_WORDS]);
            input[i / FLOAT_LANES][LIMBS * head][lane + c] = limbs.high;
            input[i / FLOAT_LANES][LIMBS * head + 1][lane + c] = limbs.low;
        }
    }
}

// ---- products of blocks with the cache: a block is two words of every port, one per clock

// The sums of one block of every port and head, from the words of both limbs: 128 * high + low, exact, below 2^27.
template <int HEADS, int PORTS>
void block_step(const word_t word[PORTS], const int8_t input[LIMBS * HEADS][INT8_LANES], bool first,
                int32_t partial[LIMBS * HEADS][PORTS], int32_t sum[HEADS][PORTS]) {
    FASTCAR_INLINE
    int8_t weight[PORTS][INT8_LANES];
    int32_t product[LIMBS * HEADS][PORTS] = {};
    FASTCAR_PARTITION(weight, 0)
    FASTCAR_PARTITION(product, 0)
    FASTCAR_UNROLL
    for (int p = 0; p < PORTS; ++p) {
        unpack_int8(word[p], weight[p]);
    }
    multiply_words<PORTS, LIMBS * HEADS, INT8_LANES>(weight, input, 0xFFFFFFFFu, product);
    FASTCAR_UNROLL
    for (int p = 0; p < PORTS; ++p) {
        FASTCAR_UNROLL
        for (int r = 0; r < LIMBS * HEADS; ++r) {
            partial[r][p] = (first ? 0 : partial[r][p]) + product[r][p];
        }
        FASTCAR_UNROLL
        for (int h = 0; h < HEADS; ++h) {
            sum[h][p] = partial[LIMBS * h][p] * (1 << LIMB_BITS) + partial[LIMBS * h + 1][p];
        }
    }
}

// The mantissas of a tile by the blocks of `input`: `count` words of every port, behind `head_words` of exponents. Every block
// meets `turns` blocks of the tile and makes way for the next one: of keys a row's blocks follow each other (turns 1), of
// values a block stays for all its elements on a port. One array, and one call, serves keys and values.
template <int HEADS, int PORTS, int WORDS, int BLOCKS, int SUMS>
void multiply_tile(const word_t tile[PORTS][WORDS], uint32_t head_words, uint32_t count, uint32_t blocks, uint32_t turns,
                   const int8_t input[BLOCKS * cache::BLOCK_WORDS][LIMBS * HEADS][INT8_LANES],
                   int32_t sums[HEADS][PORTS][SUMS]) {
    FASTCAR_NO_INLINE
    int32_t partial[LIMBS * HEADS][PORTS];
    FASTCAR_PARTITION(partial, 0)
    uint32_t block = 0;
    uint32_t turn = 0;
multiply_tile_words:
    for (uint32_t i = 0; i < count; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(2, WORDS)
        FASTCAR_RECURRENCE(partial, 1)
        const uint32_t half = i % cache::BLOCK_WORDS;
        word_t word[PORTS];
        int32_t sum[HEADS][PORTS];
        FASTCAR_PARTITION(word, 0)
        FASTCAR_PARTITION(sum, 0)
        FASTCAR_UNROLL
        for (int p = 0; p < PORTS; ++p) {
            word[p] = tile[p][head_words + i];
        }
        block_step<HEADS, PORTS>(word, input[block * cache::BLOCK_WORDS + half], half == 0, partial, sum);
        FASTCAR_UNROLL
        for (int h = 0; h < HEADS; ++h) {
            FASTCAR_UNROLL
            for (int p = 0; p < PORTS; ++p) {
                sums[h][p][i / cache::BLOCK_WORDS] = sum[h][p];
            }
        }
        const bool last = half + 1 == cache::BLOCK_WORDS;
        const bool next = last && turn + 1 == turns;
        turn = next ? 0 : last ? turn + 1 : turn;
        block = !next ? block : block + 1 == blocks ? 0 : block + 1;
    }
}

inline int clamp_exponent(int exponent) {
    FASTCAR_INLINE
    const int low = exponent < 127 ? exponent : 127;
    return low > -126 ? low : -126;
}

// The logit of one key: the blocks' sums, scaled, in ascending order. All BLOCKS adders follow each other in the pipeline, and
// nothing is carried to the next key.
template <int BLOCKS>
float logit_of(const int32_t sum[BLOCKS], const int8_t query[BLOCKS], const int8_t key[BLOCKS], uint32_t blocks, float factor) {
    FASTCAR_INLINE
    float total = 0.0f;
    bool unknown = false;
    FASTCAR_UNROLL
    for (int b = 0; b < BLOCKS; ++b) {
        const bool real = static_cast<uint32_t>(b) < blocks;
        const float scale = gate::power_of_two(clamp_exponent(query[b] + key[b]));
        const float part = static_cast<float>(sum[b]) * scale;
        const bool nan = query[b] == cache::BLOCK_OF_NAN || key[b] == cache::BLOCK_OF_NAN;
        total = !real ? total : b == 0 ? part : total + part;
        unknown = unknown || (real && nan);
    }
    return unknown ? float_of_bits(gate::NOT_A_NUMBER) : total * factor;
}

// The logits of a tile: `rows` keys from position `first` on, PORTS of them side by side in every row of the tile. A key per
// clock, all heads side by side.
template <int HEADS, int PORTS, int BLOCKS, int POSITIONS>
void scale_logits(const word_t tile[PORTS][cache::KeyTile<BLOCKS>::WORDS],
                  const int32_t sums[HEADS][PORTS][cache::KeyTile<BLOCKS>::SUMS], const int8_t query[HEADS][BLOCKS],
                  uint32_t blocks, uint32_t first, uint32_t rows, float factor, float logits[HEADS][POSITIONS]) {
    FASTCAR_NO_INLINE
    uint32_t port = 0;
    uint32_t row = 0;
    uint32_t base = 0;
scale_keys:
    for (uint32_t i = 0; i < rows; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, cache::KEY_ROWS * PORTS)
        int8_t key[BLOCKS];
        FASTCAR_PARTITION(key, 0)
        FASTCAR_UNROLL
        for (int b = 0; b < BLOCKS; ++b) {
            int8_t lanes[INT8_LANES];
            FASTCAR_PARTITION(lanes, 0)
            unpack_int8(tile[port][b], lanes);
            key[b] = lanes[row];
        }
        FASTCAR_UNROLL
        for (int h = 0; h < HEADS; ++h) {
            int32_t sum[BLOCKS];
            FASTCAR_PARTITION(sum, 0)
            FASTCAR_UNROLL
            for (int b = 0; b < BLOCKS; ++b) {
                sum[b] = sums[h][port][static_cast<uint32_t>(b) < blocks ? base + b : base];
            }
            logits[h][first + i] = logit_of<BLOCKS>(sum, query[h], key, blocks, factor);
        }
        const bool last = port + 1 == PORTS;
        port = last ? 0 : port + 1;
        row += last ? 1u : 0u;
        base += last ? blocks : 0u;
    }
}

// ---- weighted values

// The weights of one tile, `first` its first position: numerators times 2^e of the values' exponents as blocks of 15-bit
// mantissas, one per block of elements. Four positions of every head per clock; a block's exponent is found in one loop, its
// mantissas in another. Bit b of `unknown` is set where a position that is seen has a NaN in block b.
template <int HEADS, int PORTS, int BLOCKS, int POSITIONS>
uint32_t weights_of_tile(const word_t tile[PORTS][cache::ValueTile<BLOCKS, PORTS>::WORDS],
                         const int32_t numerators[HEADS][POSITIONS], uint32_t blocks, uint32_t first, const Window& window,
                         int8_t input[BLOCKS * cache::BLOCK_WORDS][LIMBS * HEADS][INT8_LANES],
                         int8_t exponents[HEADS][BLOCKS]) {
    FASTCAR_NO_INLINE
    static const int GROUPS = cache::TILE / FLOAT_LANES;  // of four positions
    float scaled[HEADS][BLOCKS * GROUPS][FLOAT_LANES];
    FASTCAR_PARTITION(scaled, 1)
    FASTCAR_PARTITION(scaled, 3)
    uint32_t largest[HEADS] = {};
    FASTCAR_PARTITION(largest, 0)
    const uint32_t groups = blocks * GROUPS;
    uint32_t unknown = 0;
scale_numerators:
    for (uint32_t i = 0; i < groups; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(GROUPS, BLOCKS * GROUPS)
        const uint32_t block = i / GROUPS;
        const uint32_t group = i % GROUPS;
        const uint32_t number = i / FLOAT_LANES;  // of the word of exponents
        int8_t lanes[INT8_LANES];
        FASTCAR_PARTITION(lanes, 0)
        unpack_int8(tile[number % PORTS][number / PORTS], lanes);
        bool seen[FLOAT_LANES];
        float scale[FLOAT_LANES];
        FASTCAR_PARTITION(seen, 0)
        FASTCAR_PARTITION(scale, 0)
        FASTCAR_UNROLL
        for (int c = 0; c < FLOAT_LANES; ++c) {
            const uint32_t position = first + group * FLOAT_LANES + c;
            const int exponent = lanes[group % FLOAT_LANES * FLOAT_LANES + c];
            seen[c] = position < window.rows && is_visible(window, position);
            scale[c] = gate::power_of_two(clamp_exponent(exponent - NUMERATOR_BITS));
            unknown |= (seen[c] && exponent == cache::BLOCK_OF_NAN ? 1u : 0u) << block;
        }
        FASTCAR_UNROLL
        for (int h = 0; h < HEADS; ++h) {
            uint32_t size[FLOAT_LANES];
            FASTCAR_PARTITION(size, 0)
            FASTCAR_UNROLL
            for (int c = 0; c < FLOAT_LANES; ++c) {
                const uint32_t position = first + group * FLOAT_LANES + c;
                const float value = seen[c] ? static_cast<float>(numerators[h][position]) * scale[c] : 0.0f;
                scaled[h][i][c] = value;
                size[c] = bits_of_float(value);
            }
            const uint32_t most = larger(larger(size[0], size[1]), larger(size[2], size[3]));
            largest[h] = larger(group == 0 ? 0u : largest[h], most);
            exponents[h][block] = wide_exponent(largest[h]);
        }
    }
split_weights:
    for (uint32_t i = 0; i < groups; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(GROUPS, BLOCKS * GROUPS)
        const uint32_t lane = i % FLOAT_LANES * FLOAT_LANES;
        FASTCAR_UNROLL
        for (int h = 0; h < HEADS; ++h) {
            FASTCAR_UNROLL
            for (int c = 0; c < FLOAT_LANES; ++c) {
                const Limbs limbs = wide_limbs(scaled[h][i][c], exponents[h][i / GROUPS]);
                input[i / FLOAT_LANES][LIMBS * h][lane + c] = limbs.high;
                input[i / FLOAT_LANES][LIMBS * h + 1][lane + c] = limbs.low;
            }
        }
    }
    return unknown;
}

// Least turns of the loop that adds tiles: a total meets itself again when its addition is done.
static const int TOTAL_DISTANCE = 8;

// Sums of a tile of values on one port, and totals: the loop takes at least TOTAL_DISTANCE turns.
template <int BLOCKS, int PORTS>
struct Totals {
    static const uint32_t SLOTS = cache::ValueTile<BLOCKS, PORTS>::SLOTS;  // elements of a block
    static const int SUMS = BLOCKS * cache::ValueTile<BLOCKS, PORTS>::SLOTS;
    static const int ENTRIES = SUMS > TOTAL_DISTANCE ? SUMS : TOTAL_DISTANCE;
};

// Adds a tile: all ports and heads side by side, an element of each per clock. `fresh`: the first tile.
template <int HEADS, int PORTS, int BLOCKS>
void add_tile(const int32_t sums[HEADS][PORTS][Totals<BLOCKS, PORTS>::SUMS],
              const int8_t exponents[HEADS][BLOCKS], uint32_t blocks, bool fresh,
              float total[HEADS][PORTS][Totals<BLOCKS, PORTS>::ENTRIES]) {
    FASTCAR_NO_INLINE
    typedef Totals<BLOCKS, PORTS> Sizes;
    const uint32_t count = blocks * Sizes::SLOTS;
    const uint32_t steps = count > TOTAL_DISTANCE ? count : TOTAL_DISTANCE;
    uint32_t slot = 0;
    uint32_t block = 0;
add_sums:
    for (uint32_t i = 0; i < steps; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(TOTAL_DISTANCE, Sizes::ENTRIES)
        FASTCAR_RECURRENCE(total, TOTAL_DISTANCE)
        const bool real = i < count;
        FASTCAR_UNROLL
        for (int h = 0; h < HEADS; ++h) {
            const float scale = gate::power_of_two(exponents[h][real ? block : 0]);
            FASTCAR_UNROLL
            for (int p = 0; p < PORTS; ++p) {
                const float part = static_cast<float>(sums[h][p][real ? i : 0]) * scale;
                total[h][p][i] = fresh ? 0.0f + part : total[h][p][i] + part;
            }
        }
        const bool last = slot + 1 == Sizes::SLOTS;
        slot = last ? 0 : slot + 1;
        block += last ? 1u : 0u;
    }
}

// Four elements of the result of a head per clock.
template <int HEADS, int PORTS, int BLOCKS, int WORDS>
void finish_head(const float total[HEADS][PORTS][Totals<BLOCKS, PORTS>::ENTRIES],
                 uint32_t head, uint32_t blocks, uint32_t unknown, float inverse, uint32_t first, word_t y[WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t words = blocks * cache::BLOCK_FLOAT_WORDS;
finish_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(8, BLOCKS * cache::BLOCK_FLOAT_WORDS)
        const uint32_t block = i / cache::BLOCK_FLOAT_WORDS;
        const bool nan = ((unknown >> block) & 1u) != 0;
        float lanes[FLOAT_LANES];
        FASTCAR_PARTITION(lanes, 0)
        FASTCAR_UNROLL
        for (int c = 0; c < FLOAT_LANES; ++c) {
            const uint32_t element = i % cache::BLOCK_FLOAT_WORDS * FLOAT_LANES + c;
            const float sum = total[head][element % PORTS][block * Totals<BLOCKS, PORTS>::SLOTS + element / PORTS];
            lanes[c] = nan ? float_of_bits(gate::NOT_A_NUMBER) : sum * inverse;
        }
        y[first + i] = pack_float(lanes);
    }
}

}  // namespace attention
}  // namespace fastcar

#endif
