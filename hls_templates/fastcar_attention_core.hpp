// Attention of one key head over an int8 cache (docs/reference/numerics.md): plain functions over words, no streams.
//
// The array computes both products (fastcar_mac.hpp). A query, and the weights of 32 values, are blocks of 32 mantissas of 15
// bits with an exponent. A mantissa is two int8 limbs, which are two rows of the array and share the word of the cache: so a
// product of 15 by 8 bits takes one multiplier. The sums of 32 products are exact. Scaled sums are added in the order of the
// definition.
#pragma once

#include "fastcar_cache_core.hpp"
#include "fastcar_mac.hpp"

namespace fastcar {
namespace attention {

// ---- softmax over logits on chip, in two passes. Logits are exponents of two. Numerators are integers, so their sum has no order
// and one addition per clock closes the loop.

static const int NUMERATOR_BITS = 24;

// A float32 to its bits as an integer that orders like the value; zeros of both signs are equal.
inline int32_t ordered(float value) {
    FASTCAR_INLINE
    const uint32_t bits = bits_of_float(value);
    const int32_t size = static_cast<int32_t>(gate::magnitude_of(bits));
    return (bits & gate::SIGN) != 0 ? -size : size;
}

// What the logits of a head have in common: the largest as `ordered`, and whether one is a NaN.
struct Largest {
    int32_t value;
    bool unknown;
};

static const int32_t LEAST_ORDERED = -0x7F800000;

// Which positions a query sees: the first `sinks` rows of the cache, and those of a ring behind them from `begin` on, `count`
// of them in ring order. A cache without a ring: no sinks, begin 0, count = positions.
struct Window {
    uint32_t sinks;  // visible ones
    uint32_t begin;  // first row
    uint32_t count;
    uint32_t ring;  // first row of the ring
    uint32_t rows;  // of the cache; 0 beyond the filled ones
};

// How far a row of the ring is behind `begin`.
inline uint32_t behind_begin(const Window& window, uint32_t row) {
    FASTCAR_INLINE
    const uint32_t lap = window.rows - window.ring;
    return row >= window.begin ? row - window.begin : row + lap - window.begin;
}

inline bool is_visible(const Window& window, uint32_t row) {
    FASTCAR_INLINE
    return row < window.ring ? row < window.sinks : behind_begin(window, row) < window.count;
}

inline Largest larger_logit(const Largest& found, float logit, bool seen) {
    FASTCAR_INLINE
    const int32_t value = ordered(logit);
    const bool nan = gate::magnitude_of(bits_of_float(logit)) > INFINITY_BITS;
    const Largest larger = {seen && !nan && value > found.value ? value : found.value, found.unknown || (seen && nan)};
    return larger;
}

inline float float_of_ordered(int32_t value) {
    FASTCAR_INLINE
    return float_of_bits(value < 0 ? static_cast<uint32_t>(-value) | gate::SIGN : static_cast<uint32_t>(value));
}

// 2^difference in units of 2^-24, for a difference of at most 0.
inline int32_t numerator_of(float difference) {
    FASTCAR_INLINE
    const float floored = difference > -30.0f ? difference : -30.0f;
    const int32_t units = round_half_even(floored * 65536.0f);
    const int32_t shift = -(units >> 16);
    const int32_t fraction = units & 0xFFFF;
    const int32_t knot = fraction >> 8;
    const int32_t low = EXP_TABLE[knot];
    const int32_t power = low + (((EXP_TABLE[knot + 1] - low) * (fraction & 255) + 128) >> 8);
    return (power + ((1 << shift) >> 1)) >> shift;
}

// What the values of a head are multiplied with: 1 / the sum of the numerators, or a NaN where the logits have no largest one.
inline float inverse_of_sum(int64_t sum, const Largest& largest) {
    FASTCAR_INLINE
    const bool finite = largest.value < 0x7F800000 && largest.value > LEAST_ORDERED && !largest.unknown;
    const float inverse = 1.0f / (static_cast<float>(sum) * gate::power_of_two(-NUMERATOR_BITS));
    return finite ? inverse : float_of_bits(gate::NOT_A_NUMBER);
}

// ---- attention

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

// Query head `head` of the query heads that share a key head: `blocks` blocks of float32 from word `first` on -> limbs in
// words of 16, and the exponents of the blocks.
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
        FASTCAR_PIPELINE(FASTCAR_KEY_INTERVAL)
        FASTCAR_TRIPS(8, BLOCKS * cache::BLOCK_FLOAT_WORDS)
        const word_t word = row[first + i];
        const uint32_t lane = i % FLOAT_LANES * FLOAT_LANES;
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
    for (int p = 0; p < PORTS; ++p) {
        unpack_int8(word[p], weight[p]);
    }
    multiply_words<PORTS, LIMBS * HEADS, INT8_LANES>(weight, input, 0xFFFFFFFFu, product);
    for (int p = 0; p < PORTS; ++p) {
        for (int r = 0; r < LIMBS * HEADS; ++r) {
            partial[r][p] = (first ? 0 : partial[r][p]) + product[r][p];
        }
        for (int h = 0; h < HEADS; ++h) {
            sum[h][p] = partial[LIMBS * h][p] * (1 << LIMB_BITS) + partial[LIMBS * h + 1][p];
        }
    }
}

// The place of one clock in a multiplication: each of `blocks` blocks is multiplied by `turns` blocks of the cache.
struct BlockPlace {
    uint32_t half;  // word of the block
    uint32_t block;
    uint32_t turn;
    bool first_lap;  // the blocks have their first product
};

inline BlockPlace next_block(const BlockPlace& now, uint32_t blocks, uint32_t turns) {
    FASTCAR_INLINE
    const bool last = now.half + 1 == cache::BLOCK_WORDS;
    const bool next = last && now.turn + 1 == turns;
    const bool lap = next && now.block + 1 == blocks;
    const BlockPlace place = {last ? 0 : now.half + 1, lap ? 0 : next ? now.block + 1 : now.block,
                              next ? 0 : last ? now.turn + 1 : now.turn, now.first_lap && !lap};
    return place;
}

inline int clamp_exponent(int exponent) {
    FASTCAR_INLINE
    const int low = exponent < 127 ? exponent : 127;
    return low > -126 ? low : -126;
}

// The logit of one key: the blocks' sums, scaled, in ascending order. All BLOCKS adders follow each other in the pipeline, and
// no value is carried to the next key.
template <int BLOCKS>
float logit_of(const int32_t sum[BLOCKS], const int8_t query[BLOCKS], const int8_t key[BLOCKS], uint32_t blocks, float factor) {
    FASTCAR_INLINE
    float total = 0.0f;
    bool unknown = false;
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

// ---- weighted values

// Four numerators of a head times 2^e of the values' exponents, and the larger of `largest` and their magnitudes. A
// position that is not seen has the weight 0.
inline uint32_t weigh_step(const int32_t numerator[FLOAT_LANES], const int8_t exponent[FLOAT_LANES], const bool seen[FLOAT_LANES],
                           uint32_t largest, float scaled[FLOAT_LANES]) {
    FASTCAR_INLINE
    uint32_t size[FLOAT_LANES];
    FASTCAR_PARTITION(size, 0)
    for (int c = 0; c < FLOAT_LANES; ++c) {
        const float scale = gate::power_of_two(clamp_exponent(exponent[c] - NUMERATOR_BITS));
        scaled[c] = seen[c] ? static_cast<float>(numerator[c]) * scale : 0.0f;
        size[c] = bits_of_float(scaled[c]);
    }
    return larger(largest, larger(larger(size[0], size[1]), larger(size[2], size[3])));
}

// Accumulators of a head's elements on one port. The loop that adds a tile takes at least TURNS iterations, so that the
// addition to an accumulator is done before the next one to it begins.
template <int BLOCKS, int PORTS, int TURNS>
struct Totals {
    static const int SLOTS = cache::ValueTile<BLOCKS, PORTS>::SLOTS;  // elements of a block
    static const int ENTRIES = BLOCKS * SLOTS > TURNS ? BLOCKS * SLOTS : TURNS;
    static uint32_t turns(uint32_t blocks) {
        FASTCAR_INLINE
        return blocks * SLOTS > static_cast<uint32_t>(TURNS) ? blocks * SLOTS : static_cast<uint32_t>(TURNS);
    }
};

// `words` words of the result of a head from `first` on, four elements per clock.
template <int HEADS, int PORTS, int BLOCKS, int TURNS, int WORDS>
void finish_head(const float total[HEADS][PORTS][Totals<BLOCKS, PORTS, TURNS>::ENTRIES],
                 uint32_t head, uint32_t unknown, float inverse, uint32_t first, uint32_t words, word_t y[WORDS]) {
    FASTCAR_NO_INLINE
finish_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(2)  // four elements may be on one port, whose memory has two
        FASTCAR_TRIPS(0, BLOCKS * cache::BLOCK_FLOAT_WORDS)
        const uint32_t block = i / cache::BLOCK_FLOAT_WORDS;
        const bool nan = ((unknown >> block) & 1u) != 0;
        float lanes[FLOAT_LANES];
        FASTCAR_PARTITION(lanes, 0)
        for (int c = 0; c < FLOAT_LANES; ++c) {
            const uint32_t element = i % cache::BLOCK_FLOAT_WORDS * FLOAT_LANES + c;
            const float sum = total[head][element % PORTS][block * Totals<BLOCKS, PORTS, TURNS>::SLOTS + element / PORTS];
            lanes[c] = nan ? float_of_bits(gate::NOT_A_NUMBER) : sum * inverse;
        }
        y[first + i] = pack_float(lanes);
    }
}

}  // namespace attention
}  // namespace fastcar
