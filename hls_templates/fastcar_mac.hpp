// Two int8 products per DSP48E2 (AMD WP486): one 27 x 18 multiplier takes (high * 2^18 + low) and a factor that both
// share, so its result is high * shared * 2^18 + low * shared. A negative low product borrows from the high product,
// which `split` gives back. Sums of packed products are split once, as long as the low sum keeps to 18 bits.
// No product is bound to a DSP by itself, and no sum of packed products is balanced: so the tool forms multiply-adds, and
// cascades of eight of them.
#pragma once

#include "fastcar_word.hpp"

namespace fastcar {

// The widths of the multiplier and of its accumulator; C simulation takes plain integers, which are much faster.
#if defined(FASTCAR_WORD_BYTES)
typedef int32_t packed_t;
typedef int64_t shared_t;
typedef int64_t packed_sum_t;
#else
typedef ap_int<27> packed_t;
typedef ap_int<18> shared_t;
typedef ap_int<48> packed_sum_t;
#endif

static const int LOW_BITS = 18;

// Products that one low sum can hold. Activations are within 127, weights within 2^(bits - 1):
// 8 * 127 * 128 < 2^17 for int8, and for int4 far more products than a word has.
static const int PRODUCTS_PER_SUM = 8;

struct Pair {
    int32_t low;
    int32_t high;
};

inline packed_t pack_pair(int8_t low, int8_t high) {
    FASTCAR_INLINE
    return static_cast<int32_t>(high) * (1 << LOW_BITS) + low;
}

inline Pair split(packed_sum_t sum) {
    FASTCAR_INLINE
    const int64_t whole = sum;
    const int32_t bits = static_cast<int32_t>(whole & ((1 << LOW_BITS) - 1));
    const int32_t low = bits >= 1 << (LOW_BITS - 1) ? bits - (1 << LOW_BITS) : bits;
    const Pair pair = {low, static_cast<int32_t>((whole - low) >> LOW_BITS)};
    return pair;
}

// One cascade: the packed products of the lanes from `first` on.
template <int LANES>
packed_sum_t sum_packed(const int8_t shared[LANES], const int8_t low[LANES], const int8_t high[LANES], int first) {
    FASTCAR_INLINE
    FASTCAR_IN_ORDER
    packed_sum_t sum = 0;
    for (int i = 0; i < PRODUCTS_PER_SUM; ++i) {
        sum += pack_pair(low[first + i], high[first + i]) * shared_t(shared[first + i]);
    }
    return sum;
}

// sum(shared * low) and sum(shared * high) over LANES lanes, with one multiplier per lane.
template <int LANES>
Pair dot_pair(const int8_t shared[LANES], const int8_t low[LANES], const int8_t high[LANES]) {
    FASTCAR_INLINE
    Pair total = {0, 0};
    static_assert(LANES % PRODUCTS_PER_SUM == 0, "a word is whole sums");
    for (int s = 0; s < LANES / PRODUCTS_PER_SUM; ++s) {
        const Pair part = split(sum_packed<LANES>(shared, low, high, s * PRODUCTS_PER_SUM));
        total.low += part.low;
        total.high += part.high;
    }
    return total;
}

template <int LANES>
int32_t dot(const int8_t left[LANES], const int8_t right[LANES]) {
    FASTCAR_INLINE
    int32_t sum = 0;
    for (int i = 0; i < LANES; ++i) {
        sum += static_cast<int16_t>(left[i] * right[i]);
    }
    return sum;
}

// One word of every port against one word of every row. Two rows share the weights of a port; a row without a partner
// shares its inputs between two ports; with one port and one row left a product has a multiplier to itself.
// Where bit r of `busy` is 0, no multiplier works for row r alone, whose products are not used.
template <int PORTS, int ROWS, int LANES>
void multiply_words(const int8_t weight[PORTS][LANES], const int8_t input[ROWS][LANES], uint32_t busy,
                    int32_t product[ROWS][PORTS]) {
    FASTCAR_INLINE
    for (int r = 0; r < ROWS / 2; ++r) {
        for (int p = 0; p < PORTS; ++p) {
            if (((busy >> (2 * r)) & 3u) != 0) {
                const Pair pair = dot_pair<LANES>(weight[p], input[2 * r], input[2 * r + 1]);
                product[2 * r][p] = pair.low;
                product[2 * r + 1][p] = pair.high;
            }
        }
    }
    if (ROWS % 2 == 1 && ((busy >> (ROWS - 1)) & 1u) != 0) {
        for (int p = 0; p < PORTS / 2; ++p) {
            const Pair pair = dot_pair<LANES>(input[ROWS - 1], weight[2 * p], weight[2 * p + 1]);
            product[ROWS - 1][2 * p] = pair.low;
            product[ROWS - 1][2 * p + 1] = pair.high;
        }
        if (PORTS % 2 == 1) product[ROWS - 1][PORTS - 1] = dot<LANES>(weight[PORTS - 1], input[ROWS - 1]);
    }
}

}  // namespace fastcar
