// Operations on float32 rows of a decode step that stay on chip: residual and rotary position embedding. Plain functions over
// words, no streams; four values per clock. docs/reference/numerics.md defines the arithmetic: one rounding per operation.
#pragma once

#include "fastcar_word.hpp"

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
}  // namespace fastcar
