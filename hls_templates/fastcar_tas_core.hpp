// Temporal Attention Score and replay gate: plain functions over words, no streams.
//
// A score is a sum of products of two float32 values, each rounded half to even to a multiple of 2^-24 and limited to 2^22
// (docs/reference/numerics.md, "TAS, bit for bit"). So the loop adds integers: one 64-bit addition per clock, no float adder
// whose latency would have to be hidden, and the same bits as every other backend.
#ifndef FASTCAR_TAS_CORE_HPP
#define FASTCAR_TAS_CORE_HPP

#include "fastcar_mapping.hpp"
#include "fastcar_word.hpp"

namespace fastcar {
namespace tas {

static const int FRACTION_BITS = 24;
static const int LIMIT_BITS = 46;
static const uint32_t NOT_FINITE = 255;                      // exponent of infinities and NaNs
static const int EXPONENT_OF_UNIT = 300 - FRACTION_BITS;     // two exponents biased by 150 each, in units of 2^-24
static const uint32_t NO_CHAIN_LIMIT = 0xFFFFFFFFu;
static const uint32_t PLUS_INFINITY = 0x7F800000u;

inline uint32_t exponent_of(uint32_t bits) {
    FASTCAR_INLINE
    return (bits >> 23) & 0xFFu;
}

// 24 bits with the hidden one; a denormal has none, and the exponent of the smallest normal number.
inline uint32_t mantissa_of(uint32_t bits) {
    FASTCAR_INLINE
    return (bits & 0x7FFFFFu) | (exponent_of(bits) != 0 ? 0x800000u : 0u);
}

// mantissa * 2^shift, limited to 2^46; shift >= 0.
inline uint64_t scaled_up(uint64_t mantissa, int shift) {
    FASTCAR_INLINE
    const uint64_t limit = static_cast<uint64_t>(1) << LIMIT_BITS;
    const bool over = shift > LIMIT_BITS || (mantissa >> (LIMIT_BITS - (shift & 63))) != 0;
    const uint64_t value = over ? limit : mantissa << (shift & 63);
    return mantissa == 0 ? 0 : value;
}

// mantissa / 2^shift, rounded half to even and limited to 2^46; shift >= 1, mantissa < 2^48.
inline uint64_t scaled_down(uint64_t mantissa, int shift) {
    FASTCAR_INLINE
    const uint64_t limit = static_cast<uint64_t>(1) << LIMIT_BITS;
    const int places = shift < 50 ? shift : 50;
    const uint64_t whole = mantissa >> places;
    const uint64_t rest = mantissa - (whole << places);
    const uint64_t half = static_cast<uint64_t>(1) << (places - 1);
    const bool up = rest > half || (rest == half && (whole & 1u) != 0);
    const uint64_t value = whole + (up ? 1u : 0u);
    return value < limit ? value : limit;
}

// One product of two float32 values given as bits, in units of 2^-24.
inline int64_t fixed_product(uint32_t a, uint32_t b) {
    FASTCAR_INLINE
    const uint32_t ea = exponent_of(a);
    const uint32_t eb = exponent_of(b);
    const uint64_t mantissa = static_cast<uint64_t>(mantissa_of(a)) * mantissa_of(b);
    const int shift = static_cast<int>((ea != 0 ? ea : 1u) + (eb != 0 ? eb : 1u)) - EXPONENT_OF_UNIT;
    const uint64_t size = shift >= 0 ? scaled_up(mantissa, shift) : scaled_down(mantissa, -shift);
    const int64_t value = static_cast<int64_t>(size);
    const bool finite = ea != NOT_FINITE && eb != NOT_FINITE;
    const bool negative = ((a ^ b) >> 31) != 0;
    const int64_t signed_value = negative ? -value : value;
    return finite ? signed_value : -(static_cast<int64_t>(1) << LIMIT_BITS);
}

inline void unpack_bits(const word_t& word, uint32_t lanes[FLOAT_LANES]) {
    FASTCAR_INLINE
#if defined(FASTCAR_WORD_BYTES)
    memcpy(lanes, &word, sizeof(word_t));
#else
    for (int i = 0; i < FLOAT_LANES; ++i) {
        FASTCAR_UNROLL
        lanes[i] = word.range(32 * i + 31, 32 * i).to_uint();
    }
#endif
}

inline int64_t word_product(const word_t& query, const word_t& key) {
    FASTCAR_INLINE
    uint32_t a[FLOAT_LANES];
    uint32_t b[FLOAT_LANES];
    FASTCAR_PARTITION(a, 0)
    FASTCAR_PARTITION(b, 0)
    unpack_bits(query, a);
    unpack_bits(key, b);
    int64_t sum = 0;
    for (int i = 0; i < FLOAT_LANES; ++i) {
        FASTCAR_UNROLL
        sum += fixed_product(a[i], b[i]);
    }
    return sum;
}

// Heads of q and of the cached key, in 128-bit words: every head begins a word, spare lanes are zero.
struct HeadShape {
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_words;
};

// One row's cached key, in one burst; it is read once for all the query heads that share a key head.
template <int KEY_WORDS>
void load_key(const word_t* key, uint32_t first, uint32_t words, word_t buffer[KEY_WORDS]) {
    FASTCAR_NO_INLINE
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, KEY_WORDS)
        buffer[i] = key[first + i];
    }
}

// The exact sum over all query heads of one row: a word of q per clock.
template <int KEY_WORDS>
int64_t row_sum(const word_t* query, uint32_t first, const HeadShape& shape, const word_t key[KEY_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t group = shape.heads / shape.kv_heads;
    const uint32_t words = shape.heads * shape.head_words;
    int64_t sum = 0;
    for (uint32_t i = 0, word = 0, member = 0, base = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, 65536)
        sum += word_product(query[first + i], key[base + word]);
        const bool last_word = word + 1 == shape.head_words;
        const bool last_member = last_word && member + 1 == group;
        word = last_word ? 0 : word + 1;
        member = last_member ? 0 : member + (last_word ? 1u : 0u);
        base += last_member ? shape.head_words : 0;
    }
    return sum;
}

template <int KEY_WORDS>
void scores_of_rows(const word_t* query, const word_t* key, uint32_t rows, const HeadShape& shape, float factor,
                    float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    word_t buffer[KEY_WORDS];
    const uint32_t key_words = shape.kv_heads * shape.head_words;
    const uint32_t query_words = shape.heads * shape.head_words;
    for (uint32_t row = 0; row < rows; ++row) {
        FASTCAR_TRIPS(1, 32)
        load_key<KEY_WORDS>(key, row * key_words, key_words, buffer);
        const int64_t sum = row_sum<KEY_WORDS>(query, row * query_words, shape, buffer);
        scores[row] = static_cast<float>(sum) * factor;
    }
}

// Which rows replay, by threshold and chain; bit b = 1: row b replays. A NaN never passes.
inline uint32_t rows_that_pass(const float scores[INDEX_REGISTER_BITS], const uint32_t chain[INDEX_REGISTER_BITS],
                               uint32_t rows, float threshold, uint32_t max_chain) {
    FASTCAR_NO_INLINE
    const bool never = bits_of_float(threshold) == PLUS_INFINITY;
    uint32_t replay = 0;
    for (uint32_t row = 0; row < rows; ++row) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, 32)
        const bool chained = max_chain == NO_CHAIN_LIMIT || chain[row] < max_chain;
        const bool passes = scores[row] >= threshold && !never && chained;
        replay |= (passes ? 1u : 0u) << row;
    }
    return replay;
}

// Rows b and b + rows / 2 are a pair; a pair replays only when both would.
inline uint32_t couple_pairs(uint32_t replay, uint32_t rows) {
    FASTCAR_INLINE
    const uint32_t half = rows / 2;
    const uint32_t both = replay & (replay >> half) & ((1u << half) - 1u);
    return both | (both << half);
}

}  // namespace tas
}  // namespace fastcar

#endif
