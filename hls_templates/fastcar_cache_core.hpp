// Keys and values as int8 blocks with one exponent each (docs/reference/numerics.md, "int8"), and where they lie in memory.
// Plain functions over words, no streams. A weight port has a section of the cache, as it has a section of the weights.
//
// Keys: position s of head n (counted over the rows of the batch) is row s / P of port (s + n) mod P. So a key is a channel of
// the array, its words hold 16 elements, and the heads of a position are on all ports. A tile is 16 rows of a port: a word of
// exponents per block, then the rows. Values: a tile is the 32 positions of one block of weights; a word holds one element at
// 16 positions, so that the array sums over positions. Element i of a block is on port i mod P. The exponents of a tile, two
// words per block, are spread over the ports and stand before the elements.
#pragma once

#include "fastcar_gate_core.hpp"
#include "fastcar_numerics.hpp"

namespace fastcar {
namespace cache {

static const int BLOCK = 32;             // elements that share an exponent
static const int BLOCK_FLOAT_WORDS = 8;  // words of float32
static const int BLOCK_WORDS = 2;        // words of int8
static const int KEY_ROWS = 16;          // rows of a tile on one port
static const int TILE = 32;              // positions of a tile of values
static const int LEAST_EXPONENT = -120;
static const int BLOCK_OF_NAN = -128;
static const int EXCESS = 133;
static const uint32_t LARGEST_BITS = 0x7F7E0000u;  // 127 * 2^121; larger magnitudes count as this
static const uint32_t CARRY = 1u << 16;            // carries into the exponent from 127.5 / 128 of a power of two on

// Magnitude bits of a value as it is stored; the bits of a NaN are above the bits of every number.
inline uint32_t stored_magnitude(uint32_t bits) {
    FASTCAR_INLINE
    const uint32_t size = gate::magnitude_of(bits);
    return size > LARGEST_BITS && size <= INFINITY_BITS ? LARGEST_BITS : size;
}

inline uint32_t largest_step(uint32_t largest, const word_t& word) {
    FASTCAR_INLINE
    const uint32_t low = larger(stored_magnitude(lane_bits(word, 0)), stored_magnitude(lane_bits(word, 1)));
    const uint32_t high = larger(stored_magnitude(lane_bits(word, 2)), stored_magnitude(lane_bits(word, 3)));
    return larger(largest, larger(low, high));
}

// The exponent of a block whose largest magnitude has these bits.
inline int8_t exponent_of_block(uint32_t largest) {
    FASTCAR_INLINE
    const int exponent = static_cast<int>((largest + CARRY) >> 23) - EXCESS;
    const int limited = exponent > LEAST_EXPONENT ? exponent : LEAST_EXPONENT;
    return static_cast<int8_t>(largest > INFINITY_BITS ? BLOCK_OF_NAN : limited);
}

// The mantissa of a value in a block of this exponent; the product is exact.
inline int8_t mantissa_of(uint32_t bits, int8_t exponent) {
    FASTCAR_INLINE
    const bool known = exponent != BLOCK_OF_NAN;
    const float value = float_of_bits((bits & gate::SIGN) | stored_magnitude(bits));
    const float scaled = known ? value * gate::power_of_two(-exponent) : 0.0f;
    return static_cast<int8_t>(round_half_even(scaled));
}

inline void mantissas_step(const word_t& word, int8_t exponent, int8_t mantissas[FLOAT_LANES]) {
    FASTCAR_INLINE
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        mantissas[lane] = mantissa_of(lane_bits(word, lane), exponent);
    }
}

// A head of `head_words` float32 words from `first` on -> mantissas and exponents. Mantissas of missing elements are zero.
// exponents: a word per clock; mantissas: four elements per clock.
template <int WORDS, int BLOCKS>
void quantize_head(const word_t row[WORDS], uint32_t first, uint32_t head_words, int8_t mantissas[BLOCKS * BLOCK],
                   int8_t exponents[BLOCKS]) {
    FASTCAR_NO_INLINE
    uint32_t largest = 0;
find_exponents:
    for (uint32_t i = 0; i < head_words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, BLOCKS * BLOCK_FLOAT_WORDS)
        largest = largest_step(i % BLOCK_FLOAT_WORDS == 0 ? 0 : largest, row[first + i]);
        exponents[i / BLOCK_FLOAT_WORDS] = exponent_of_block(largest);
    }
round_mantissas:
    for (uint32_t i = 0; i < BLOCKS * BLOCK_FLOAT_WORDS; ++i) {
        FASTCAR_PIPELINE(1)
        const bool real = i < head_words;
        int8_t lanes[FLOAT_LANES];
        FASTCAR_PARTITION(lanes, 0)
        mantissas_step(real ? row[first + i] : word_t(0), real ? exponents[i / BLOCK_FLOAT_WORDS] : int8_t(0), lanes);
        for (int lane = 0; lane < FLOAT_LANES; ++lane) {
            mantissas[FLOAT_LANES * i + lane] = lanes[lane];
        }
    }
}

// ---- appending to one port's section of a head; `first` is the head's first word in the section

// A word with one of its 16 bytes replaced.
inline word_t replace_step(const word_t& word, uint32_t lane, int8_t value) {
    FASTCAR_INLINE
    int8_t lanes[INT8_LANES];
    FASTCAR_PARTITION(lanes, 0)
    unpack_int8(word, lanes);
    for (int i = 0; i < INT8_LANES; ++i) {
        lanes[i] = static_cast<uint32_t>(i) == lane ? value : lanes[i];
    }
    return pack_int8(lanes);
}

// Beats of an AXI port, which carry AXI_WORDS weight ports each; in one burst.
template <int AXI_WORDS, int WORDS>
void read_beats(const typename Beat<AXI_WORDS>::Type* cache, uint32_t first, uint32_t count,
                typename Beat<AXI_WORDS>::Type beats[WORDS]) {
    FASTCAR_NO_INLINE
read_each_beat:
    for (uint32_t i = 0; i < count; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, WORDS)
        beats[i] = cache[first + i];
    }
}

// The weight port of a position's key, of a head whose number is `turned` modulo the ports.
template <int PORTS>
uint32_t port_of_key(uint32_t position, uint32_t turned) {
    FASTCAR_INLINE
    const uint32_t port = position % PORTS + turned;
    return port >= PORTS ? port - PORTS : port;
}

// The value of `turned` for the next head.
template <int PORTS>
uint32_t next_turn(uint32_t turned) {
    FASTCAR_INLINE
    return turned + 1 == PORTS ? 0 : turned + 1;
}

// The place of the key of row `row` of a weight port: the exponents of its tile, and its own words.
struct KeyPlace {
    uint32_t exponents;
    uint32_t mantissas;
};

inline KeyPlace place_of_key(uint32_t first, uint32_t row, uint32_t blocks) {
    FASTCAR_INLINE
    const uint32_t words = blocks * BLOCK_WORDS;
    const uint32_t tile = first + row / KEY_ROWS * (blocks + KEY_ROWS * words);
    const KeyPlace place = {tile, tile + blocks + row % KEY_ROWS * words};
    return place;
}

// AXI port `axi` gets the whole key at `position`, or no word (`turned`: port_of_key). Other words of its beats, and the
// exponents of other rows, keep their values; beats of one word are not read.
template <int BLOCKS, int PORTS, int AXI_WORDS>
void append_key(const int8_t mantissas[BLOCKS * BLOCK], const int8_t exponents[BLOCKS], uint32_t blocks, uint32_t first,
                uint32_t position, uint32_t turned, uint32_t axi, typename Beat<AXI_WORDS>::Type* cache) {
    FASTCAR_NO_INLINE
    typedef typename Beat<AXI_WORDS>::Type beat_t;
    const uint32_t port = port_of_key<PORTS>(position, turned);
    const int index = static_cast<int>(port % AXI_WORDS);
    const uint32_t row = position / PORTS;
    const uint32_t own = port / AXI_WORDS == axi ? blocks : 0;
    const KeyPlace place = place_of_key(first, row, blocks);
    beat_t head[BLOCKS];
    beat_t words[BLOCKS * BLOCK_WORDS];
    read_beats<AXI_WORDS, BLOCKS>(cache, place.exponents, own, head);
    read_beats<AXI_WORDS, BLOCKS * BLOCK_WORDS>(cache, place.mantissas, AXI_WORDS > 1 ? own * BLOCK_WORDS : 0, words);
write_exponents:
    for (uint32_t i = 0; i < own; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, BLOCKS)
        const word_t changed = replace_step(word_of_beat<AXI_WORDS>(head[i], index), row % KEY_ROWS, exponents[i]);
        cache[place.exponents + i] = beat_with_word<AXI_WORDS>(head[i], index, changed);
    }
write_mantissas:
    for (uint32_t i = 0; i < own * BLOCK_WORDS; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, BLOCKS * BLOCK_WORDS)
        int8_t lanes[INT8_LANES];
        FASTCAR_PARTITION(lanes, 0)
        for (int lane = 0; lane < INT8_LANES; ++lane) {
            lanes[lane] = mantissas[INT8_LANES * i + lane];
        }
        cache[place.mantissas + i] = beat_with_word<AXI_WORDS>(words[i], index, pack_int8(lanes));
    }
}

// A key as float32 words, exactly: four elements per clock. A block with a NaN gives NaNs. `key`: the exponents of its tile, a
// word per block, then its mantissas.
template <int BLOCKS, int WORDS>
void expand_key(const word_t key[3 * BLOCKS], uint32_t row, uint32_t blocks, uint32_t target, word_t words[WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t count = blocks * BLOCK_FLOAT_WORDS;
expand_words:
    for (uint32_t i = 0; i < count; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(8, BLOCKS * BLOCK_FLOAT_WORDS)
        int8_t lanes[INT8_LANES];
        int8_t exponents[INT8_LANES];
        float values[FLOAT_LANES];
        FASTCAR_PARTITION(lanes, 0)
        FASTCAR_PARTITION(exponents, 0)
        FASTCAR_PARTITION(values, 0)
        unpack_int8(key[blocks + i / FLOAT_LANES], lanes);
        unpack_int8(key[i / BLOCK_FLOAT_WORDS], exponents);
        const int8_t exponent = exponents[row % KEY_ROWS];
        const bool known = exponent != BLOCK_OF_NAN;
        const float scale = gate::power_of_two(known ? exponent : 0);
        for (int c = 0; c < FLOAT_LANES; ++c) {
            const float value = static_cast<float>(lanes[i % FLOAT_LANES * FLOAT_LANES + c]) * scale;
            values[c] = known ? value : float_of_bits(gate::NOT_A_NUMBER);
        }
        words[target + i] = pack_float(values);
    }
}

// Elements of a block on one port.
template <int PORTS>
struct SlotsOf {
    static const int COUNT = (BLOCK + PORTS - 1) / PORTS;
};

// Words of a block of values and of the exponents of all blocks, on one port.
template <int BLOCKS, int PORTS>
struct ValueTile {
    static const int SLOTS = SlotsOf<PORTS>::COUNT;
    static const int HEAD = (2 * BLOCKS + PORTS - 1) / PORTS;
    static const int WORDS = HEAD + 2 * BLOCKS * SLOTS;
};

// The place of the loop over a tile of values: in the words of exponents (2 * block + half, over all ports), or of mantissas.
struct TilePlace {
    uint32_t number;   // number of the word of exponents
    uint32_t half;     // half of the positions: words of mantissas alternate
    uint32_t element;  // element of the block
    uint32_t base;     // first element of the block
};

// The byte of a value that a word of port `port` gets, if any; moves on to the port's next word. `half`: half of the positions.
template <int BLOCKS, int PORTS>
word_t value_step(const word_t& word, const int8_t mantissas[BLOCKS * BLOCK], const int8_t exponents[BLOCKS], uint32_t blocks,
                  bool head, uint32_t half, uint32_t lane, uint32_t port, TilePlace& now) {
    FASTCAR_INLINE
    const uint32_t block = now.number >> 1;
    const bool exponent = head && (now.number & 1u) == half && block < blocks;
    const bool mantissa = !head && now.half == half && now.element < BLOCK;
    const int8_t value = exponent ? exponents[block] : mantissa ? mantissas[now.base + now.element] : int8_t(0);
    const word_t changed = exponent || mantissa ? replace_step(word, lane, value) : word;
    const bool last_of_element = !head && now.half == 1;
    const bool last_of_block = last_of_element && now.element + PORTS >= static_cast<uint32_t>(SlotsOf<PORTS>::COUNT) * PORTS;
    now.number += head ? static_cast<uint32_t>(PORTS) : 0u;
    now.half = head || last_of_element ? 0 : 1;
    now.element = last_of_block ? port : last_of_element ? now.element + PORTS : now.element;
    now.base += last_of_block ? static_cast<uint32_t>(BLOCK) : 0u;
    return changed;
}

// AXI port `axi` gets the elements of the value at `position` that belong to its weight ports, a byte of every other word of
// the tile, and the exponents that belong to these ports. The tile is read in one burst and written in a second burst.
template <int BLOCKS, int PORTS, int AXI_WORDS>
void append_value(const int8_t mantissas[BLOCKS * BLOCK], const int8_t exponents[BLOCKS], uint32_t blocks, uint32_t head_words,
                  uint32_t first, uint32_t position, uint32_t axi, typename Beat<AXI_WORDS>::Type* cache) {
    FASTCAR_NO_INLINE
    typedef ValueTile<BLOCKS, PORTS> Tile;
    typedef typename Beat<AXI_WORDS>::Type beat_t;
    beat_t tile[Tile::WORDS];
    const uint32_t words = head_words + 2 * blocks * Tile::SLOTS;
    const uint32_t at = first + position / TILE * words;
    const uint32_t half = position % TILE / INT8_LANES;
    const uint32_t lane = position % INT8_LANES;
    TilePlace now[AXI_WORDS];
    FASTCAR_PARTITION(now, 0)
begin_ports:
    for (uint32_t index = 0; index < AXI_WORDS; ++index) {
        FASTCAR_PIPELINE(1)
        const uint32_t port = axi * AXI_WORDS + index;
        const TilePlace begin = {port, 0, port, 0};
        now[index] = begin;
    }
    read_beats<AXI_WORDS, Tile::WORDS>(cache, at, words, tile);
write_values:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, Tile::WORDS)
        FASTCAR_RECURRENCE(now, 1)
        const bool head = i < head_words;
        beat_t beat = tile[i];
        for (int index = 0; index < AXI_WORDS; ++index) {
            const word_t changed =
                value_step<BLOCKS, PORTS>(word_of_beat<AXI_WORDS>(beat, index), mantissas, exponents, blocks, head, half,
                                          lane, axi * AXI_WORDS + index, now[index]);
            beat = beat_with_word<AXI_WORDS>(beat, index, changed);
        }
        cache[at + i] = beat;
    }
}

}  // namespace cache
}  // namespace fastcar
