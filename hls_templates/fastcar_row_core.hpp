// Operations on float32 rows of a decode step that stay on chip: residual, rotary position embedding and norms. Plain functions
// over words, no streams; four values per clock. docs/reference/numerics.md defines the arithmetic: one rounding per operation.
#pragma once

#include "fastcar_gate_core.hpp"
#include "fastcar_numerics.hpp"

namespace fastcar {
namespace row {

// ---- residual

inline word_t add_step(const word_t& left, const word_t& right) {
    FASTCAR_INLINE
    float sum[FLOAT_LANES];
    FASTCAR_PARTITION(sum, 0)
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        sum[lane] = unpack_float(left, lane) + unpack_float(right, lane);
    }
    return pack_float(sum);
}

// x + y -> x. A word is written once and read once, so no addition waits for an earlier one.
template <int X_WORDS, int Y_WORDS>
void add_row(const word_t y[Y_WORDS], uint32_t words, word_t x[X_WORDS]) {
    FASTCAR_NO_INLINE
add_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, X_WORDS)
        FASTCAR_INDEPENDENT(x)
        const word_t sum = add_step(x[i], y[i]);
        x[i] = sum;
    }
}

// ---- draft

// bias + gain * (cached - bias) + left: the output of a row that replays, each operation rounded once (docs/reference/numerics.md).
inline word_t draft_step(const word_t& bias, const word_t& cached, const word_t& left, float gain) {
    FASTCAR_INLINE
    float sum[FLOAT_LANES];
    FASTCAR_PARTITION(sum, 0)
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        const float own = unpack_float(bias, lane);
        const float kept = gain * (unpack_float(cached, lane) - own);
        sum[lane] = (own + kept) + unpack_float(left, lane);
    }
    return pack_float(sum);
}

// ---- rotary position embedding

// Heads of a row in words, and the part of a head that rotates: its first 2 * half_words words. Element i of the first half
// is paired with element i of the second half.
struct Rotation {
    uint32_t first;       // first word
    uint32_t pairs;       // words of a half, of all heads
    uint32_t head_words;  // words of a head
    uint32_t half_words;  // words of half of the rotating part
};

// One word of a half against the same word of the other half: own * cos - other * sin in the first half, + in the second.
inline word_t rotate_step(const word_t& own, const word_t& other, const word_t& cosine, const word_t& sine, bool first_half) {
    FASTCAR_INLINE
    float turned[FLOAT_LANES];
    FASTCAR_PARTITION(turned, 0)
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        const float straight = unpack_float(own, lane) * unpack_float(cosine, lane);
        const float crossed = unpack_float(other, lane) * unpack_float(sine, lane);
        turned[lane] = first_half ? straight - crossed : straight + crossed;
    }
    return pack_float(turned);
}

// All heads of a row, two words in two clocks: each is read and written, which is four accesses on two ports. What does
// not rotate stays. cosine, sine: half_words words of this position.
template <int WORDS, int HALF_WORDS>
void rotate_row(const word_t cosine[HALF_WORDS], const word_t sine[HALF_WORDS], const Rotation& shape, word_t y[WORDS]) {
    FASTCAR_NO_INLINE
    uint32_t head = shape.first;
    uint32_t word = 0;  // of the half
rotate_words:
    for (uint32_t i = 0; i < shape.pairs; ++i) {
        FASTCAR_PIPELINE(2)
        FASTCAR_TRIPS(1, WORDS)
        FASTCAR_INDEPENDENT(y)
        const word_t low = y[head + word], high = y[head + word + shape.half_words];
        y[head + word] = rotate_step(low, high, cosine[word], sine[word], true);
        y[head + word + shape.half_words] = rotate_step(high, low, cosine[word], sine[word], false);
        const bool last = word + 1 == shape.half_words;
        head += last ? shape.head_words : 0u;
        word = last ? 0 : word + 1;
    }
}

}  // namespace row

// RMSNorm and layer norm. The row is rounded to integers of at most 2^18 in magnitude first, so one 64-bit addition per clock
// closes the loop, and a square takes one multiplier of 27 by 18 bits and a few LUT.
namespace norm {

static const uint32_t LEAST_FIELD = 94;  // exponent field that scales a row of small values
static const int SCALE_FIELD = 144;      // a row is divided by 2^(field - SCALE_FIELD)
static const int DROPPED_BITS = 6;       // of the 24 bits of the largest value
static const int MEAN_FIELD = 149;       // as SCALE_FIELD, of a mean
static const int MEAN_DROPPED_BITS = 1;

inline uint32_t field_of(uint32_t largest) {
    FASTCAR_INLINE
    const uint32_t field = tas::exponent_of(largest);
    return field > LEAST_FIELD ? field : LEAST_FIELD;
}

// The magnitude of a value whose row's largest one keeps all but `dropped` of its bits, rounded half to even: at most 2^18 of 6.
inline uint32_t whole_magnitude(uint32_t bits, uint32_t field, int dropped) {
    FASTCAR_INLINE
    const uint32_t own = tas::exponent_of(bits);
    const int shift = static_cast<int>(field) + dropped - static_cast<int>(own != 0 ? own : 1u);
    return static_cast<uint32_t>(tas::scaled_down(tas::mantissa_of(bits), shift));
}

inline uint64_t squares_step(uint64_t sum, const word_t& word, uint32_t field) {
    FASTCAR_INLINE
    uint64_t square[FLOAT_LANES];
    FASTCAR_PARTITION(square, 0)
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        const uint64_t size = whole_magnitude(lane_bits(word, lane), field, DROPPED_BITS);
        square[lane] = size * size;
    }
    return sum + ((square[0] + square[1]) + (square[2] + square[3]));
}

inline int64_t values_step(int64_t sum, const word_t& word, uint32_t field) {
    FASTCAR_INLINE
    int64_t value[FLOAT_LANES];
    FASTCAR_PARTITION(value, 0)
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        const uint32_t bits = lane_bits(word, lane);
        const int64_t size = whole_magnitude(bits, field, MEAN_DROPPED_BITS);
        value[lane] = bits >> 31 != 0 ? -size : size;
    }
    return sum + ((value[0] + value[1]) + (value[2] + value[3]));
}

inline word_t subtract_from(const word_t& x, float mean) {
    FASTCAR_INLINE
    float y[FLOAT_LANES];
    FASTCAR_PARTITION(y, 0)
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        y[lane] = unpack_float(x, lane) - mean;
    }
    return pack_float(y);
}

// A row or a head without its mean: of x to a, or where it is in y (`heads`). inverse_size: float32(1 / values). A row with a value that is not finite keeps it, whatever the
// mean.
template <int X_WORDS, int A_WORDS, int Y_WORDS>
void center(const word_t x[X_WORDS], bool heads, uint32_t first, uint32_t words, float inverse_size, word_t a[A_WORDS], word_t y[Y_WORDS]) {
    FASTCAR_NO_INLINE
    uint32_t largest = 0;
find_largest_value:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, X_WORDS)
        largest = larger(largest, gate::largest_lane(heads ? y[first + i] : x[first + i]));
    }
    const uint32_t field = field_of(largest);
    int64_t sum = 0;
add_values:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, X_WORDS)
        sum = values_step(sum, heads ? y[first + i] : x[first + i], field);
    }
    const float mean = static_cast<float>(sum) * inverse_size * gate::power_of_two(static_cast<int>(field) - MEAN_FIELD);
subtract_mean:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, X_WORDS)
        FASTCAR_INDEPENDENT(y)
        const word_t own = heads ? y[first + i] : x[first + i];
        const word_t rest = subtract_from(own, mean);
        if (heads) y[first + i] = rest;
        if (!heads) a[first + i] = rest;
    }
}

// 1 / sqrt(mean + epsilon). A NaN where the row has a value that is not finite; 0 where the mean is infinite.
inline float inverse_root(uint64_t sum, uint32_t largest, float inverse_size, float epsilon) {
    FASTCAR_INLINE
    const float scale = gate::power_of_two(static_cast<int>(field_of(largest)) - SCALE_FIELD);
    const float mean = static_cast<float>(static_cast<int64_t>(sum)) * inverse_size;
    const float spread = mean * scale * scale + epsilon;
    const bool infinite = bits_of_float(spread) == INFINITY_BITS;
    const float inverse = infinite ? 0.0f : 1.0f / gate::square_root(infinite ? 1.0f : spread);
    return gate::finite_or_nan(largest, inverse);
}

inline word_t scale_word(const word_t& x, const word_t& weight, float inverse) {
    FASTCAR_INLINE
    float y[FLOAT_LANES];
    FASTCAR_PARTITION(y, 0)
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        y[lane] = unpack_float(x, lane) * inverse * unpack_float(weight, lane);
    }
    return pack_float(y);
}

// `words` words of a row from `first` on: a whole row of x, or of a where it is centred, to a; or one head in y. `given`: words of `memory`
// that become the weight meanwhile: all words or no word. inverse_size: float32(1 / values).
template <int X_WORDS, int A_WORDS, int Y_WORDS, int NORM_WORDS>
void normalize(const word_t x[X_WORDS], bool heads, bool centered, uint32_t first, uint32_t words, const word_t* memory, uint32_t weight_at,
               uint32_t given, float inverse_size, float epsilon, word_t weight[NORM_WORDS], word_t a[A_WORDS], word_t y[Y_WORDS]) {
    FASTCAR_NO_INLINE
    uint32_t largest = 0;
read_weight:
    for (uint32_t i = 0; i < given; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, NORM_WORDS)
        weight[i] = memory[weight_at + i];
        largest = larger(largest, gate::largest_lane(heads ? y[first + i] : centered ? a[first + i] : x[first + i]));
    }
    const uint32_t left = words - given;
find_largest:
    for (uint32_t i = 0; i < left; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, NORM_WORDS)
        largest = larger(largest, gate::largest_lane(heads ? y[first + given + i] : centered ? a[first + given + i] : x[first + given + i]));
    }
    const uint32_t field = field_of(largest);
    uint64_t sum = 0;
add_squares:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, NORM_WORDS)
        sum = squares_step(sum, heads ? y[first + i] : centered ? a[first + i] : x[first + i], field);
    }
    const float inverse = inverse_root(sum, largest, inverse_size, epsilon);
scale_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, NORM_WORDS)
        FASTCAR_INDEPENDENT(a)
        FASTCAR_INDEPENDENT(y)
        const word_t own = heads ? y[first + i] : centered ? a[first + i] : x[first + i];
        const word_t scaled = scale_word(own, weight[i], inverse);
        if (heads) y[first + i] = scaled;
        if (!heads) a[first + i] = scaled;
    }
}

}  // namespace norm
}  // namespace fastcar
