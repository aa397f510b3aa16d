// Scores of every gate of the fabric but `tas`: plain functions over words, no streams.
//
// docs/reference/numerics.md, "Scores, bit for bit", defines them. Every sum is one of integers: one 64-bit addition per
// clock closes each loop, so a word enters per clock (II = 1), and the order of the words does not matter. What is float
// stands in loop-free functions after the loops.
#pragma once

#include "fastcar_tas_core.hpp"

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

// ---- the gate `learned`: a network of one hidden layer on x and its change (docs/reference/numerics.md, "learned")

static const uint32_t LEAST_EXPONENT = 22;  // exponent field of a row of features
static const int SCALE_FIELD = 148;         // a feature times 2^(SCALE_FIELD - field) is at most 2^22
static const int BFLOAT_LANES = 8;

// A network in memory: a word with the number of units, then the units. A unit is one word of b1, w2, the exponent of the
// lowest bit of its weights, b2 (in every unit), then its bfloat16 weights, eight to a word: those of x, then those of the
// change, each padded with zeros to whole words.
struct UnitTail {
    int64_t sum;
    uint32_t b1;
    uint32_t w2;
    uint32_t place;
};

// Reads a row, a word per clock: |x - cached| follows x in `raw`. Returns the largest magnitude of both. `padded` is `words`,
// or one more, so that it is even.
template <int WORDS>
uint32_t features_of_row(const word_t* x, uint32_t first, uint32_t words, uint32_t padded, const word_t cached[WORDS],
                         uint32_t raw[2 * WORDS + 2][FLOAT_LANES]) {
    FASTCAR_NO_INLINE
    uint32_t largest = 0;
read_features:
    for (uint32_t i = 0; i < padded; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, WORDS + 1)
        const bool spare = i >= words;
        const word_t now = spare ? word_t(0) : x[first + i];
        const word_t before = spare ? word_t(0) : cached[i];
        for (int lane = 0; lane < FLOAT_LANES; ++lane) {
            const uint32_t change = change_of(lane_bits(now, lane), lane_bits(before, lane));
            raw[i][lane] = lane_bits(now, lane);
            raw[padded + i][lane] = change;
            largest = larger(largest, larger(change, magnitude_of(lane_bits(now, lane))));
        }
    }
    return largest;
}

inline uint32_t field_of(uint32_t largest) {
    FASTCAR_INLINE
    return larger(tas::exponent_of(largest), LEAST_EXPONENT);
}

// A feature as an integer of at most 2^22, rounded half to even.
inline int32_t whole_feature(uint32_t bits, uint32_t field) {
    FASTCAR_INLINE
    const uint32_t own = tas::exponent_of(bits);
    const int shift = static_cast<int>(field) + 2 - static_cast<int>(own != 0 ? own : 1u);
    const int32_t size = static_cast<int32_t>(tas::scaled_down(tas::mantissa_of(bits), shift));
    return (bits & SIGN) != 0 ? -size : size;
}

// In place, a word per clock; it writes what it read, so no word meets itself again.
template <int WORDS>
void round_features(uint32_t raw[2 * WORDS + 2][FLOAT_LANES], uint32_t count, uint32_t field) {
    FASTCAR_NO_INLINE
round_words:
    for (uint32_t i = 0; i < count; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, 2 * WORDS + 2)
        for (int lane = 0; lane < FLOAT_LANES; ++lane) {
            raw[i][lane] = static_cast<uint32_t>(whole_feature(raw[i][lane], field));
        }
    }
}

// bfloat16 times an integer feature, in units of the unit's lowest bit: exact. 8 by 23 bits, one DSP, and a shift.
inline int64_t weight_product(uint32_t weight, int32_t feature, int place) {
    FASTCAR_INLINE
    const uint32_t own = (weight >> 7) & 0xFFu;
    const uint32_t mantissa = (weight & 0x7Fu) | (own != 0 ? 0x80u : 0u);
    const uint32_t size = static_cast<uint32_t>(feature < 0 ? -feature : feature);
    const uint64_t product = static_cast<uint64_t>(mantissa * size);
    const int shift = static_cast<int>(own != 0 ? own : 1u) - 134 - place;
    const uint64_t moved = shift >= 0 ? product << (shift & 63) : product >> (-shift & 63);
    const bool negative = ((weight >> 15) != 0) != (feature < 0);
    return negative ? -static_cast<int64_t>(moved) : static_cast<int64_t>(moved);
}

// The body of the loop: eight weights of one word, and two words of features.
inline int64_t weight_step(int64_t sum, const word_t& weights, const uint32_t low[FLOAT_LANES],
                           const uint32_t high[FLOAT_LANES], int place) {
    FASTCAR_INLINE
    int64_t total = 0;
    for (int lane = 0; lane < BFLOAT_LANES; ++lane) {
        const uint32_t pair = lane_bits(weights, lane / 2);
        const uint32_t weight = (lane & 1) != 0 ? pair >> 16 : pair & 0xFFFFu;
        const uint32_t feature = lane < FLOAT_LANES ? low[lane % FLOAT_LANES] : high[lane % FLOAT_LANES];
        total += weight_product(weight, static_cast<int32_t>(feature), place);
    }
    return sum + total;
}

// The sums of all units, a word of the weights per clock. `count`: words of features. Returns b2 as bits.
template <int WORDS, int UNITS>
uint32_t sums_of_units(const word_t* network, uint32_t first, uint32_t units, const uint32_t features[2 * WORDS + 2][FLOAT_LANES],
                       uint32_t count, UnitTail tails[UNITS]) {
    FASTCAR_NO_INLINE
    const uint32_t words = 1 + (count >> 1);
    const uint32_t total = units * words;
    UnitTail tail = {0, 0, 0, 0};
    uint32_t b2 = 0;
    uint32_t word = 0;
    uint32_t unit = 0;
read_weights:
    for (uint32_t i = 0; i < total; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, UNITS * (2 + WORDS))
        const word_t now = network[first + i];
        const uint32_t pair = word == 0 ? 0 : 2 * (word - 1);
        const int64_t sum = weight_step(tail.sum, now, features[pair], features[pair + 1], static_cast<int>(tail.place));
        if (word == 0) {
            const UnitTail head = {0, lane_bits(now, 0), lane_bits(now, 1), lane_bits(now, 2)};
            tail = head;
            b2 = lane_bits(now, 3);
        } else {
            tail.sum = sum;
        }
        const bool last = word + 1 == words;
        if (last) tails[unit] = tail;
        word = last ? 0 : word + 1;
        unit += last ? 1u : 0u;
    }
    return b2;
}

// relu of one unit: the sum in float32, moved to its place (both products are exact), and the bias.
inline float hidden_of(const UnitTail& tail, uint32_t field) {
    FASTCAR_INLINE
    const float sum = static_cast<float>(tail.sum) * power_of_two(static_cast<int>(tail.place));
    const float hidden = sum * power_of_two(static_cast<int>(field) - SCALE_FIELD) + float_of_bits(tail.b1);
    return hidden > 0.0f ? hidden : 0.0f;
}

// The second layer, a unit per clock; the float functions are in the pipeline.
template <int UNITS>
float network_score(const UnitTail tails[UNITS], uint32_t units, uint32_t largest, uint32_t b2) {
    FASTCAR_NO_INLINE
    const uint32_t field = field_of(largest);
    uint32_t most = largest;
    int64_t total = 0;
add_units:
    for (uint32_t unit = 0; unit < units; ++unit) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, UNITS)
        const uint32_t hidden = bits_of_float(hidden_of(tails[unit], field));
        most = larger(most, hidden);
        total += tas::fixed_product(tails[unit].w2, hidden);
    }
    return finite_or_nan(most, static_cast<float>(total) * power_of_two(-tas::FRACTION_BITS) + float_of_bits(b2));
}

// Minus the scores of rows from `begin` to `end`, whose x follow each other. Word `first` of `network` has the number of units; more than `most` are not read.
template <int WORDS, int UNITS>
void network_scores(const word_t* x, const word_t* cached, uint32_t begin, uint32_t end, uint32_t words, const word_t* network,
                    uint32_t first, uint32_t most, float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    word_t buffer[WORDS];
    uint32_t features[2 * WORDS + 2][FLOAT_LANES];
    UnitTail tails[UNITS];
    FASTCAR_PARTITION(features, 2)
    FASTCAR_PARTITION_CYCLIC(features, 1, 2)
    const uint32_t given = lane_bits(network[first], 0);
    const uint32_t room = most < static_cast<uint32_t>(UNITS) ? most : static_cast<uint32_t>(UNITS);
    const uint32_t units = given < room ? given : room;
    const uint32_t padded = (words + 1) & ~1u;
    uint32_t at = 0;
score_networks:
    for (uint32_t row = begin; row < end; ++row) {
        FASTCAR_TRIPS(1, 32)
        tas::load_key<WORDS>(cached, at, words, buffer);
        const uint32_t largest = features_of_row<WORDS>(x, at, words, padded, buffer, features);
        round_features<WORDS>(features, 2 * padded, field_of(largest));
        const uint32_t b2 = sums_of_units<WORDS, UNITS>(network, first + 1, units, features, 2 * padded, tails);
        scores[row] = -network_score<UNITS>(tails, units, largest, b2);
        at += words;
    }
}

}  // namespace gate
}  // namespace fastcar
