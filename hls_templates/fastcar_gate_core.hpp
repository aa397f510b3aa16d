// Scores of every gate of the fabric but `tas`: plain functions over words, no streams.
//
// docs/reference/numerics.md, "Scores, bit for bit", defines them. Every sum is one of integers: one 64-bit addition per
// clock closes each loop, so a word enters per clock (II = 1), and the order of the words does not matter. What is float
// stands in loop-free functions after the loops.
#pragma once

#include "fastcar_tas_core.hpp"
#include "fastcar_word.hpp"

namespace fastcar {
namespace gate {

static const uint32_t SIGN = 0x80000000u;
static const uint32_t NOT_A_NUMBER = 0x7FC00000u;

inline uint32_t magnitude_of(uint32_t bits) {
    FASTCAR_INLINE
    return bits & ~SIGN;
}

inline uint32_t largest_lane(const word_t& word) {
    FASTCAR_INLINE
    const uint32_t low = larger(magnitude_of(lane_bits(word, 0)), magnitude_of(lane_bits(word, 1)));
    const uint32_t high = larger(magnitude_of(lane_bits(word, 2)), magnitude_of(lane_bits(word, 3)));
    return larger(low, high);
}

// |x - cached| as bits: one float subtraction.
inline uint32_t change_of(uint32_t x, uint32_t cached) {
    FASTCAR_INLINE
    return magnitude_of(bits_of_float(float_of_bits(x) - float_of_bits(cached)));
}

inline bool is_finite(uint32_t largest) {
    FASTCAR_INLINE
    return tas::exponent_of(largest) != tas::NOT_FINITE;
}

inline float finite_or_nan(uint32_t largest, float score) {
    FASTCAR_INLINE
    return is_finite(largest) ? score : float_of_bits(NOT_A_NUMBER);
}

// 2^exponent as float32; -126 <= exponent <= 127.
inline float power_of_two(int exponent) {
    FASTCAR_INLINE
    return float_of_bits(static_cast<uint32_t>(exponent + 127) << 23);
}

// A float32 that is not negative, in units of 2^-24, rounded half to even and limited to 2^46.
inline int64_t fixed_magnitude(uint32_t bits) {
    FASTCAR_INLINE
    const uint32_t field = tas::exponent_of(bits);
    const int shift = static_cast<int>(field != 0 ? field : 1u) - (150 - tas::FRACTION_BITS);
    const uint64_t mantissa = tas::mantissa_of(bits);
    const uint64_t size = shift >= 0 ? tas::scaled_up(mantissa, shift) : tas::scaled_down(mantissa, -shift);
    return static_cast<int64_t>(size);
}

// The square root, rounded half to even, of zero or a normal number: one bit of the result per step.
inline float square_root(float value) {
    FASTCAR_INLINE
    const uint32_t bits = bits_of_float(value);
    const int place = static_cast<int>(tas::exponent_of(bits)) - 150;
    const bool even = (place & 1) == 0;
    const uint64_t radicand = static_cast<uint64_t>(tas::mantissa_of(bits)) << (even ? 26 : 25);  // 2^48 to 2^50
    uint64_t root = 0;
    uint64_t rest = 0;
    for (int i = 0; i < 25; ++i) {
        rest = (rest << 2) | ((radicand >> (48 - 2 * i)) & 3u);
        const uint64_t trial = (root << 2) | 1u;
        const bool one = rest >= trial;
        rest = one ? rest - trial : rest;
        root = (root << 1) | (one ? 1u : 0u);
    }
    // 24 bits and one for rounding. The root of a float is never halfway between two floats.
    const uint32_t mantissa = static_cast<uint32_t>((root >> 1) + (root & 1u));
    const int half = (place - (even ? 26 : 25)) / 2;
    const uint32_t field = static_cast<uint32_t>(half + 150);
    return float_of_bits(bits == 0 ? 0u : (field << 23) + mantissa);
}

// ---- input_delta

// Sums of |x - cached| and |x| in units of 2^-24, and the largest bits of |x - cached|: not finite where x or cached is not.
struct Change {
    int64_t change;
    int64_t size;
    uint32_t largest;
};

// The body of the loop: one word of x and one of the cached x.
inline Change change_step(const Change& so_far, const word_t& x, const word_t& cached) {
    FASTCAR_INLINE
    const uint32_t d0 = change_of(lane_bits(x, 0), lane_bits(cached, 0));
    const uint32_t d1 = change_of(lane_bits(x, 1), lane_bits(cached, 1));
    const uint32_t d2 = change_of(lane_bits(x, 2), lane_bits(cached, 2));
    const uint32_t d3 = change_of(lane_bits(x, 3), lane_bits(cached, 3));
    const int64_t change = (fixed_magnitude(d0) + fixed_magnitude(d1)) + (fixed_magnitude(d2) + fixed_magnitude(d3));
    const int64_t low = fixed_magnitude(lane_bits(x, 0)) + fixed_magnitude(lane_bits(x, 1));
    const int64_t high = fixed_magnitude(lane_bits(x, 2)) + fixed_magnitude(lane_bits(x, 3));
    const uint32_t largest = larger(larger(d0, d1), larger(d2, d3));
    const Change sum = {so_far.change + change, so_far.size + (low + high), larger(so_far.largest, largest)};
    return sum;
}

// One row, a word of x per clock; spare lanes are zero. The cached x is on chip, as both come over one port.
template <int WORDS>
Change change_of_row(const word_t* x, uint32_t first, uint32_t words, const word_t cached[WORDS]) {
    FASTCAR_NO_INLINE
    Change sum = {0, 0, 0};
read_change:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, WORDS)
        sum = change_step(sum, x[first + i], cached[i]);
    }
    return sum;
}

inline float change_score(const Change& sum) {
    FASTCAR_INLINE
    const float size = static_cast<float>(sum.size);
    return finite_or_nan(sum.largest, static_cast<float>(sum.change) / (size > 1.0f ? size : 1.0f));
}

// Minus the scores of rows from `begin` to `end`, each of `words` words that follow each other: where small scores replay, minus the score is compared.
template <int WORDS>
void change_scores(const word_t* x, const word_t* cached, uint32_t begin, uint32_t end, uint32_t words,
                   float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    word_t buffer[WORDS];
    uint32_t at = 0;
score_changes:
    for (uint32_t row = begin; row < end; ++row) {
        FASTCAR_TRIPS(1, 32)
        tas::load_key<WORDS>(cached, at, words, buffer);
        scores[row] = -change_score(change_of_row<WORDS>(x, at, words, buffer));
        at += words;
    }
}

}  // namespace gate
}  // namespace fastcar
