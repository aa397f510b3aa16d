// The 128-bit memory word: 16 int8 lanes or 4 float32 lanes, lane 0 in the lowest bits (little-endian bytes).
#ifndef FASTCAR_WORD_HPP
#define FASTCAR_WORD_HPP

#include <stdint.h>

#include "fastcar_ap_int.hpp"
#include "fastcar_pragmas.hpp"

namespace fastcar {

typedef ap_uint<128> word_t;

static const int INT8_LANES = 16;
static const int FLOAT_LANES = 4;

template <int COUNT, int LANES>
struct WordsFor {
    static const int VALUE = (COUNT + LANES - 1) / LANES;
};

inline float float_of_bits(uint32_t bits) {
    FASTCAR_INLINE
    union {
        uint32_t u;
        float f;
    } cell;
    cell.u = bits;
    return cell.f;
}

inline uint32_t bits_of_float(float value) {
    FASTCAR_INLINE
    union {
        uint32_t u;
        float f;
    } cell;
    cell.f = value;
    return cell.u;
}

// Native halves keep C simulation fast; in hardware the shifts are wires.
inline void unpack_int8(const word_t& word, int8_t lanes[INT8_LANES]) {
    FASTCAR_INLINE
    const uint64_t half[2] = {word.range(63, 0).to_uint64(), word.range(127, 64).to_uint64()};
    for (int i = 0; i < INT8_LANES; ++i) {
        FASTCAR_UNROLL
        lanes[i] = static_cast<int8_t>(static_cast<uint8_t>(half[i / 8] >> (8 * (i % 8))));
    }
}

inline float unpack_float(const word_t& word, int lane) {
    FASTCAR_INLINE
    const uint64_t half = lane < 2 ? word.range(63, 0).to_uint64() : word.range(127, 64).to_uint64();
    return float_of_bits(static_cast<uint32_t>(half >> (32 * (lane % 2))));
}

inline word_t pack_float(const float lanes[FLOAT_LANES]) {
    FASTCAR_INLINE
    word_t word = 0;
    for (int i = 0; i < FLOAT_LANES; ++i) {
        FASTCAR_UNROLL
        word.range(32 * i + 31, 32 * i) = bits_of_float(lanes[i]);
    }
    return word;
}

}  // namespace fastcar

#endif
