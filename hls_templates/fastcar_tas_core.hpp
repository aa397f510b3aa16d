// Temporal Attention Score and replay gate: plain functions over words, no streams.
//
// A score is a sum of products of two float32 values, each rounded half to even to a multiple of 2^-24 and limited to 2^22
// (docs/reference/numerics.md, "TAS, bit for bit"). So the loop adds integers: one 64-bit addition per clock, no float adder
// whose latency would have to be hidden, and the same bits as every other backend.
#pragma once

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

// The body of the sum's loop: four products of one word of q and one of the key.
inline int64_t product_step(int64_t sum, const word_t& query, const word_t& key) {
    FASTCAR_INLINE
    const int64_t low = fixed_product(lane_bits(query, 0), lane_bits(key, 0)) +
                        fixed_product(lane_bits(query, 1), lane_bits(key, 1));
    const int64_t high = fixed_product(lane_bits(query, 2), lane_bits(key, 2)) +
                         fixed_product(lane_bits(query, 3), lane_bits(key, 3));
    return sum + (low + high);
}

// Heads of q and of the cached key, in 128-bit words: every head begins a word, spare lanes are zero. All of it comes from
// the table; `group` query heads share a key head, `query_words` and `key_words` are those of one row.
struct HeadShape {
    uint32_t group;
    uint32_t head_words;
    uint32_t query_words;
    uint32_t key_words;
};

// Where a row's loop is: `word` of the head, `member` of the group, first word of the key head, query head.
struct Place {
    uint32_t word;
    uint32_t member;
    uint32_t base;
    uint32_t head;
};

// The place of the next word of q. A loop over heads holds one product of its own, and reads its own memories: a step that
// is passed to one loop would carry a pointer to the weights on chip, which is no argument of a function in hardware.
inline Place next_place(const Place& at, uint32_t head_words, uint32_t group) {
    FASTCAR_INLINE
    const bool last_word = at.word + 1 == head_words;
    const bool last_member = last_word && at.member + 1 == group;
    const Place next = {last_word ? 0 : at.word + 1, last_member ? 0 : at.member + (last_word ? 1u : 0u),
                        at.base + (last_member ? head_words : 0), at.head + (last_word ? 1u : 0u)};
    return next;
}

// One row's cached key, in one burst; it is read once for all the query heads that share a key head.
template <int KEY_WORDS>
void load_key(const word_t* key, uint32_t first, uint32_t words, word_t buffer[KEY_WORDS]) {
    FASTCAR_NO_INLINE
read_key:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, KEY_WORDS)
        buffer[i] = key[first + i];
    }
}

// The exact sum over all query heads of one row. q comes in one burst, a word per clock, and meets the key in the buffer.
template <int QUERY_WORDS, int KEY_WORDS>
int64_t row_sum(const word_t* query, uint32_t first, const HeadShape& shape, const word_t key[KEY_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t head_words = shape.head_words;
    const uint32_t group = shape.group;
    int64_t sum = 0;
    Place at = {0, 0, 0, 0};
read_query:
    for (uint32_t i = 0; i < shape.query_words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, QUERY_WORDS)
        sum = product_step(sum, query[first + i], key[at.base + at.word]);
        at = next_place(at, head_words, group);
    }
    return sum;
}

// Chosen heads: a word of q times the weight of its head, one float multiplication per lane.
inline word_t weighted_word(const word_t& query, uint32_t weight) {
    FASTCAR_INLINE
    const float factor = float_of_bits(weight);
    return word_of_bits(bits_of_float(unpack_float(query, 0) * factor), bits_of_float(unpack_float(query, 1) * factor),
                        bits_of_float(unpack_float(query, 2) * factor), bits_of_float(unpack_float(query, 3) * factor));
}

// The same sum with q of a head times its weight. The weights are on chip, so that one is read per clock.
template <int QUERY_WORDS, int KEY_WORDS, int HEADS>
int64_t weighted_row_sum(const word_t* query, uint32_t first, const HeadShape& shape, const word_t key[KEY_WORDS],
                         const uint32_t weights[HEADS]) {
    FASTCAR_NO_INLINE
    const uint32_t head_words = shape.head_words;
    const uint32_t group = shape.group;
    int64_t sum = 0;
    Place at = {0, 0, 0, 0};
read_weighted_query:
    for (uint32_t i = 0; i < shape.query_words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, QUERY_WORDS)
        sum = product_step(sum, weighted_word(query[first + i], weights[at.head]), key[at.base + at.word]);
        at = next_place(at, head_words, group);
    }
    return sum;
}

// The scores of rows from `begin` to `end`, whose operands follow each other. HEADS: that may have a weight each; none takes room of
// one. weighted: they have.
template <int QUERY_WORDS, int KEY_WORDS, int HEADS, int ROOM>
void scores_of_rows(const word_t* query, const word_t* key, uint32_t begin, uint32_t end, const HeadShape& shape, float factor,
                    bool weighted, const uint32_t weights[ROOM], float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    word_t buffer[KEY_WORDS];
    uint32_t query_at = 0;
    uint32_t key_at = 0;
score_rows:
    for (uint32_t row = begin; row < end; ++row) {
        FASTCAR_TRIPS(1, 32)
        load_key<KEY_WORDS>(key, key_at, shape.key_words, buffer);
        const int64_t sum = HEADS > 0 && weighted
                                ? weighted_row_sum<QUERY_WORDS, KEY_WORDS, ROOM>(query, query_at, shape, buffer, weights)
                                : row_sum<QUERY_WORDS, KEY_WORDS>(query, query_at, shape, buffer);
        scores[row] = static_cast<float>(sum) * factor;
        query_at += shape.query_words;
        key_at += shape.key_words;
    }
}

// Which rows replay, by threshold and chain; bit b = 1: row b replays. A NaN never passes.
inline uint32_t rows_that_pass(const float scores[INDEX_REGISTER_BITS], const uint32_t chain[INDEX_REGISTER_BITS],
                               uint32_t rows, float threshold, uint32_t max_chain) {
    FASTCAR_NO_INLINE
    const bool never = bits_of_float(threshold) == PLUS_INFINITY;
    uint32_t replay = 0;
compare_rows:
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
    const uint32_t half = rows >> 1;
    const uint32_t both = replay & (replay >> half) & ((1u << half) - 1u);
    return both | (both << half);
}

}  // namespace tas
}  // namespace fastcar
