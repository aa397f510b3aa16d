// Softmax over logits on chip, in two passes: plain functions, no streams (docs/reference/numerics.md). Logits are exponents
// of two. Numerators are integers, so their sum has no order and one addition per clock closes the loop.
#pragma once

#include "fastcar_gate_core.hpp"
#include "fastcar_numerics.hpp"
#include "fastcar_tables.hpp"

namespace fastcar {
namespace attention {

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
    uint32_t first;  // position in row `begin`
};

// How far a row of the ring is behind `begin`.
inline uint32_t behind_begin(const Window& window, uint32_t row) {
    FASTCAR_INLINE
    const uint32_t lap = window.rows - window.ring;
    return row >= window.begin ? row - window.begin : row + lap - window.begin;
}

// The position that a visible row holds.
inline uint32_t position_of(const Window& window, uint32_t row) {
    FASTCAR_INLINE
    return row < window.ring ? row : window.first + behind_begin(window, row);
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

}  // namespace attention
}  // namespace fastcar
