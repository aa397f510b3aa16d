// Numerics, bit for bit as docs/reference/numerics.md defines them: IEEE float32, one rounding per operation, no FMA.
// (The fabric's float operators flush denormals to zero; equality with the reference holds for normal numbers.)
// Comparisons are written so that a NaN takes a defined branch and no conversion to integer is out of range.
#pragma once

#include <stdint.h>

#include "fastcar_tables.hpp"
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
        word[i] = lanes[i];
    }
}

// FLOAT_LANES values of a row from k on; values beyond `count` are zero.
template <int K>
void load_lanes(const float row[K], int k, int count, float x[FLOAT_LANES]) {
    FASTCAR_INLINE
    for (int i = 0; i < FLOAT_LANES; ++i) {
        x[i] = k + i < count ? row[k + i] : 0.0f;
    }
}

// The largest |x| so far, after FLOAT_LANES more values of which the first `real` count. |x| is compared as an integer,
// which orders like the float; a NaN is passed over. The lanes meet in a tree: one comparison follows `amax`.
inline uint32_t amax_step(uint32_t amax, const float x[FLOAT_LANES], int real) {
    FASTCAR_INLINE
    uint32_t size[FLOAT_LANES];
    FASTCAR_PARTITION(size, 0)
    for (int i = 0; i < FLOAT_LANES; ++i) {
        const uint32_t bits = bits_of_float(x[i]) & 0x7FFFFFFFu;
        size[i] = i < real && bits <= INFINITY_BITS ? bits : 0u;
    }
    return larger(amax, larger(larger(size[0], size[1]), larger(size[2], size[3])));
}

// FLOAT_LANES values -> int8, of which the first `real` count; the other lanes are zero.
inline void quantize_step(const float x[FLOAT_LANES], float inverse, int real, int8_t q[FLOAT_LANES]) {
    FASTCAR_INLINE
    for (int i = 0; i < FLOAT_LANES; ++i) {
        q[i] = i < real ? quantize(x[i], inverse) : static_cast<int8_t>(0);
    }
}

inline float dequantize(int32_t accumulator, float row_scale, float channel_scale) {
    FASTCAR_INLINE
    const float scale = row_scale * channel_scale;
    return static_cast<float>(accumulator) * scale;
}

// ---- activations: act(x) = x * factor(x), as fastcar_compile.ir.ops.linear defines them, where the factor is a table of 513 knots,
// linear in between, in integers. ReLU and its square need no table.

template <int ACTIVATION>
float factor(float x) {
    FASTCAR_INLINE
    typedef Factor<ACTIVATION> Table;
    const float limit = static_cast<float>(Table::LIMIT);
    const float steps = static_cast<float>(16384 / Table::LIMIT);
    const int32_t fixed = round_half_even(clamp(x, limit) * steps) + 16384;
    const int32_t index = (fixed >> 6) < 511 ? (fixed >> 6) : 511;
    const int32_t fraction = fixed - (index << 6);
    // The operator weights both knots. One product is enough: 64 times the left one stays whole in the shift.
    const int32_t knot = Table::knot(index);
    const int32_t part = (Table::knot(index + 1) - knot) * fraction + 32;
    return static_cast<float>(knot + (part >> 6)) * (1.0f / 16777216.0f);
}

template <int ACTIVATION>
struct Activate {
    static float of(float x) {
        FASTCAR_INLINE
        return x * factor<ACTIVATION>(x);
    }
};

template <>
struct Activate<RELU> {
    static float of(float x) {
        FASTCAR_INLINE
        return x > 0.0f ? x : 0.0f;
    }
};

template <>
struct Activate<RELU2> {
    static float of(float x) {
        FASTCAR_INLINE
        const float positive = x > 0.0f ? x : 0.0f;
        return positive * positive;
    }
};

}  // namespace fastcar
