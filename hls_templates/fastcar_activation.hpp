// Activations, bit for bit as fastcar_compile.ir.ops.linear defines them: act(x) = x * factor(x), where the factor is a
// table of 513 knots, linear in between, in integers. ReLU and its square need no table.
#pragma once

#include "fastcar_numerics.hpp"
#include "fastcar_tables.hpp"

namespace fastcar {

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
