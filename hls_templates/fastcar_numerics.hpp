// Numerics, bit for bit as docs/reference/numerics.md defines them: IEEE float32, one rounding per operation, no FMA.
// (The fabric's float operators flush denormals to zero; equality with the reference holds for normal numbers.)
// Comparisons are written so that a NaN takes a defined branch and no conversion to integer is out of range.
#ifndef FASTCAR_NUMERICS_HPP
#define FASTCAR_NUMERICS_HPP

#include <stdint.h>

#include "fastcar_pragmas.hpp"
#include "fastcar_word.hpp"

namespace fastcar {

static const uint32_t INFINITY_BITS = 0x7F800000u;
static const float SMALLEST_AMAX = 1e-30f;
static const float ONE_OVER_127 = 1.0f / 127.0f;

// Round half to even; |value| < 2^22. `value - whole` is exact, so nothing rounds twice.
inline int32_t round_half_even(float value) {
    FASTCAR_INLINE
    const int32_t whole = static_cast<int32_t>(value);
    const float rest = value - static_cast<float>(whole);
    const bool odd = (whole & 1) != 0;
    const bool up = rest > 0.5f || (rest == 0.5f && odd);
    const bool down = rest < -0.5f || (rest == -0.5f && odd);
    return whole + (up ? 1 : 0) - (down ? 1 : 0);
}

inline float clamp(float value, float limit) {
    FASTCAR_INLINE
    const float low = value < limit ? value : limit;
    return low > -limit ? low : -limit;
}

inline float row_amax_floor(float amax) {
    FASTCAR_INLINE
    return amax > SMALLEST_AMAX ? amax : SMALLEST_AMAX;
}

// Clamping first is the same as rounding first: the limits are integers.
inline int8_t quantize(float value, float inverse) {
    FASTCAR_INLINE
    return static_cast<int8_t>(round_half_even(clamp(value * inverse, 127.0f)));
}

template <int LANES>
void store_lanes(const int8_t lanes[LANES], int8_t word[LANES]) {
    FASTCAR_INLINE
    for (int i = 0; i < LANES; ++i) {
        FASTCAR_UNROLL
        word[i] = lanes[i];
    }
}

// One row: float32 [K] -> int8 [WORDS][LANES], spare lanes zero; returns the row's scale.
// |x| is compared as an integer, which orders like the float and takes one clock; a NaN is passed over.
// q is written in whole words: its lanes are one wide memory. Inlined, because the caller's q is split by row.
// A shorter row than K takes its own count of values and words. FLOAT_LANES values per clock: x has that many banks.
template <int K, int WORDS, int LANES>
float quantize_row(const float x[K], int8_t q[WORDS][LANES], int count = K, int words = WORDS) {
    FASTCAR_INLINE
    uint32_t amax = 0;
    for (int k = 0; k < count; k += FLOAT_LANES) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, K / FLOAT_LANES + 1)
        for (int i = 0; i < FLOAT_LANES; ++i) {
            FASTCAR_UNROLL
            const uint32_t size = k + i < count ? bits_of_float(x[k + i]) & 0x7FFFFFFFu : 0u;
            amax = size > amax && size <= INFINITY_BITS ? size : amax;
        }
    }
    const float floored = row_amax_floor(float_of_bits(amax));
    const float inverse = 127.0f / floored;
    int8_t lanes[LANES] = {};
    FASTCAR_PARTITION(lanes, 0)
    for (int k = 0; k < words * LANES; k += FLOAT_LANES) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(LANES / FLOAT_LANES, WORDS * LANES / FLOAT_LANES)
        for (int i = 0; i < FLOAT_LANES; ++i) {
            FASTCAR_UNROLL
            lanes[k % LANES + i] = k + i < count ? quantize(x[k + i], inverse) : static_cast<int8_t>(0);
        }
        if (k % LANES == LANES - FLOAT_LANES) {
            store_lanes<LANES>(lanes, q[k / LANES]);
        }
    }
    return floored * ONE_OVER_127;
}

inline float dequantize(int32_t accumulator, float row_scale, float channel_scale) {
    FASTCAR_INLINE
    const float scale = row_scale * channel_scale;
    return static_cast<float>(accumulator) * scale;
}

}  // namespace fastcar

#endif
