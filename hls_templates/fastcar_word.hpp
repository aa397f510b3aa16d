// The 128-bit memory word: 32 int4 lanes, 16 int8 lanes, 8 float16 lanes or 4 float32 lanes, lane 0 in the lowest bits
// (little-endian bytes). Of the int4 lanes, 0 to 15 are the low nibbles of the bytes and 16 to 31 the high ones.
#pragma once

#include <stdint.h>
#include <string.h>

#include "fastcar_pragmas.hpp"

namespace fastcar {

typedef ap_uint<128> word_t;
typedef ap_uint<256> beat2_t;
typedef ap_uint<512> beat4_t;

static const int INT4_LANES = 32;
static const int INT8_LANES = 16;
static const int HALF_LANES = 8;
static const int FLOAT_LANES = 4;

template <int COUNT, int LANES>
struct WordsFor {
    static const int VALUE = (COUNT + LANES - 1) / LANES;
};

// A beat of an AXI port that carries WORDS logical ports, word by word.
template <int WORDS>
struct Beat;
template <>
struct Beat<1> {
    typedef word_t Type;
};
template <>
struct Beat<2> {
    typedef beat2_t Type;
};
template <>
struct Beat<4> {
    typedef beat4_t Type;
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

// C simulation reads the bytes of a word (a little-endian host, ap_uint<128> in 16 bytes): range() of the simulation
// headers takes fifty times as long. Hardware, and g++ with FASTCAR_WORD_BY_RANGE, take ranges, which are wires.
#if !defined(__SYNTHESIS__) && !defined(FASTCAR_WORD_BY_RANGE)
#define FASTCAR_WORD_BYTES
static_assert(sizeof(word_t) == 16, "define FASTCAR_WORD_BY_RANGE for headers with another layout of ap_uint<128>");
#endif

template <int WORDS>
word_t word_of_beat(const typename Beat<WORDS>::Type& beat, int index) {
    FASTCAR_INLINE
    word_t word = 0;
#if defined(FASTCAR_WORD_BYTES)
    static_assert(sizeof(beat) == 16 * WORDS, "define FASTCAR_WORD_BY_RANGE for headers with another layout");
    memcpy(static_cast<void*>(&word), reinterpret_cast<const char*>(&beat) + 16 * index, sizeof(word_t));
#else
    word = beat.range(128 * index + 127, 128 * index);
#endif
    return word;
}

// The beat with one of its words replaced.
template <int WORDS>
typename Beat<WORDS>::Type beat_with_word(const typename Beat<WORDS>::Type& beat, int index, const word_t& word) {
    FASTCAR_INLINE
    typename Beat<WORDS>::Type changed = beat;
#if defined(FASTCAR_WORD_BYTES)
    memcpy(reinterpret_cast<char*>(&changed) + 16 * index, &word, sizeof(word_t));
#else
    changed.range(128 * index + 127, 128 * index) = word;
#endif
    return changed;
}

inline void unpack_int8(const word_t& word, int8_t lanes[INT8_LANES]) {
    FASTCAR_INLINE
#if defined(FASTCAR_WORD_BYTES)
    memcpy(lanes, &word, sizeof(word_t));
#else
    for (int i = 0; i < INT8_LANES; ++i) {
        lanes[i] = static_cast<int8_t>(static_cast<uint8_t>(word.range(8 * i + 7, 8 * i).to_uint()));
    }
#endif
}

inline word_t pack_int8(const int8_t lanes[INT8_LANES]) {
    FASTCAR_INLINE
    word_t word = 0;
#if defined(FASTCAR_WORD_BYTES)
    memcpy(static_cast<void*>(&word), lanes, sizeof(word_t));
#else
    for (int i = 0; i < INT8_LANES; ++i) {
        word.range(8 * i + 7, 8 * i) = static_cast<uint8_t>(lanes[i]);
    }
#endif
    return word;
}

inline void unpack_int4(const word_t& word, int8_t lanes[INT4_LANES]) {
    FASTCAR_INLINE
    int8_t bytes[INT8_LANES];
    FASTCAR_PARTITION(bytes, 0)
    unpack_int8(word, bytes);
    for (int i = 0; i < INT8_LANES; ++i) {
        // Exclusive or and subtraction extend the sign of four bits.
        lanes[i] = static_cast<int8_t>(((bytes[i] & 15) ^ 8) - 8);
        lanes[INT8_LANES + i] = static_cast<int8_t>((((bytes[i] >> 4) & 15) ^ 8) - 8);
    }
}

// The larger one; bits of float32 values that are not negative order like the values.
inline uint32_t larger(uint32_t left, uint32_t right) {
    FASTCAR_INLINE
    return left > right ? left : right;
}

// Lane `lane` of a word of lanes of BITS bits.
template <int BITS = 32>
uint32_t lane_bits(const word_t& word, int lane) {
    FASTCAR_INLINE
#if defined(FASTCAR_WORD_BYTES)
    uint32_t bits = 0;
    memcpy(&bits, reinterpret_cast<const char*>(&word) + BITS / 8 * lane, BITS / 8);
    return bits;
#else
    return word.range(BITS * lane + BITS - 1, BITS * lane).to_uint();
#endif
}

inline float unpack_float(const word_t& word, int lane) {
    FASTCAR_INLINE
    return float_of_bits(lane_bits(word, lane));
}

// A float16 that is positive and normal, or the zero of padding (which then counts as 2^-15, of nothing).
inline float unpack_half(const word_t& word, int lane) {
    FASTCAR_INLINE
    return float_of_bits((lane_bits<16>(word, lane) << 13) + (112u << 23));
}

inline word_t word_of_bits(uint32_t lane0, uint32_t lane1, uint32_t lane2, uint32_t lane3) {
    FASTCAR_INLINE
    word_t word = 0;
#if defined(FASTCAR_WORD_BYTES)
    const uint32_t lanes[FLOAT_LANES] = {lane0, lane1, lane2, lane3};
    memcpy(static_cast<void*>(&word), lanes, sizeof(word_t));
#else
    word.range(31, 0) = lane0;
    word.range(63, 32) = lane1;
    word.range(95, 64) = lane2;
    word.range(127, 96) = lane3;
#endif
    return word;
}

inline word_t pack_float(const float lanes[FLOAT_LANES]) {
    FASTCAR_INLINE
    return word_of_bits(bits_of_float(lanes[0]), bits_of_float(lanes[1]), bits_of_float(lanes[2]), bits_of_float(lanes[3]));
}

}  // namespace fastcar
