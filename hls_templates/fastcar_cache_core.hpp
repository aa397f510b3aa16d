// Keys and values as int8 blocks with one exponent each (docs/reference/numerics.md, "int8"), and where they lie in memory.
// Plain functions over words, no streams. A weight port has a section of the cache as it has one of the weights.
//
// Keys: position s is row s / P of port s mod P, so that a key is a channel of the array and its words hold 16 elements. A
// tile is 16 rows of a port: a word of exponents per block, then the rows. Values: a tile is 32 positions, as many as share a
// block of weights; a word holds 16 of them of one element, so that the array sums over positions. Element i of a block is on
// port i mod P. The exponents of a tile, two words per block, begin its ports' words in turn.
#ifndef FASTCAR_CACHE_CORE_HPP
#define FASTCAR_CACHE_CORE_HPP

#include "fastcar_gate_core.hpp"
#include "fastcar_numerics.hpp"

namespace fastcar {
namespace cache {

static const int BLOCK = 32;             // elements that share an exponent
static const int BLOCK_FLOAT_WORDS = 8;  // words of float32
static const int BLOCK_WORDS = 2;        // words of int8
static const int KEY_ROWS = 16;          // of a tile, on one port
static const int TILE = 32;              // positions of a tile of values
static const int LEAST_EXPONENT = -120;
static const int BLOCK_OF_NAN = -128;
static const int EXCESS = 133;
static const uint32_t LARGEST_BITS = 0x7F7E0000u;  // 127 * 2^121; larger magnitudes count as this
static const uint32_t CARRY = 1u << 16;            // carries into the exponent from 127.5 / 128 of a power of two on

// Magnitude bits of a value as it is stored; those of a NaN are above all others.
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
    FASTCAR_UNROLL
    for (int lane = 0; lane < FLOAT_LANES; ++lane) {
        mantissas[lane] = mantissa_of(lane_bits(word, lane), exponent);
    }
}

// A head of `head_words` float32 words from `first` on -> mantissas and exponents. Mantissas of missing elements are zero.
// exponents: a word per clock; mantissas: the same, four elements.
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
        FASTCAR_UNROLL
        for (int lane = 0; lane < FLOAT_LANES; ++lane) {
            mantissas[FLOAT_LANES * i + lane] = lanes[lane];
        }
    }
}

// ---- appending: what one port's section of a head gets; `first` is the head's first word in it

// A word with one of its 16 bytes replaced.
inline word_t replace_step(const word_t& word, uint32_t lane, int8_t value) {
    FASTCAR_INLINE
    int8_t lanes[INT8_LANES];
    FASTCAR_PARTITION(lanes, 0)
    unpack_int8(word, lanes);
    FASTCAR_UNROLL
    for (int i = 0; i < INT8_LANES; ++i) {
        lanes[i] = static_cast<uint32_t>(i) == lane ? value : lanes[i];
    }
    return pack_int8(lanes);
}

// Words of a tile of keys on one port, and the blocks in it.
template <int BLOCKS>
struct KeyTile {
    static const int WORDS = BLOCKS * (1 + KEY_ROWS * BLOCK_WORDS);
    static const int SUMS = BLOCKS * KEY_ROWS;
};

// A tile's words, read in one burst.
template <int WORDS>
void read_tile(const word_t* section, uint32_t first, uint32_t count, word_t tile[WORDS]) {
    FASTCAR_NO_INLINE
read_words:
    for (uint32_t i = 0; i < count; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, WORDS)
        tile[i] = section[first + i];
    }
}

// The words of a key, 16 elements each.
template <int BLOCKS>
void write_key(const int8_t mantissas[BLOCKS * BLOCK], uint32_t first, uint32_t words, word_t* section) {
    FASTCAR_NO_INLINE
write_key_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, BLOCKS * BLOCK_WORDS)
        int8_t lanes[INT8_LANES];
        FASTCAR_PARTITION(lanes, 0)
        FASTCAR_UNROLL
        for (int lane = 0; lane < INT8_LANES; ++lane) {
            lanes[lane] = mantissas[INT8_LANES * i + lane];
        }
        section[first + i] = pack_int8(lanes);
    }
}

// Byte `lane` of a tile's exponents.
template <int BLOCKS>
void write_key_exponents(const int8_t exponents[BLOCKS], uint32_t blocks, uint32_t first, uint32_t lane, word_t* section) {
    FASTCAR_NO_INLINE
    word_t head[BLOCKS];
    read_tile<BLOCKS>(section, first, blocks, head);
write_exponents:
    for (uint32_t i = 0; i < blocks; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, BLOCKS)
        section[first + i] = replace_step(head[i], lane, exponents[i]);
    }
}

// Port `port` gets all of the key at `position`, or nothing.
template <int BLOCKS, int PORTS>
void append_key(const int8_t mantissas[BLOCKS * BLOCK], const int8_t exponents[BLOCKS], uint32_t blocks, uint32_t first,
                uint32_t position, uint32_t port, word_t* section) {
    FASTCAR_NO_INLINE
    const uint32_t row = position / PORTS;
    const uint32_t words = blocks * BLOCK_WORDS;
    const uint32_t tile = first + row / KEY_ROWS * (blocks + KEY_ROWS * words);
    if (position % PORTS == port) {
        write_key_exponents<BLOCKS>(exponents, blocks, tile, row % KEY_ROWS, section);
        write_key<BLOCKS>(mantissas, tile + blocks + row % KEY_ROWS * words, words, section);
    }
}

// The key of row `row` of this port as float32 words, exactly: four elements per clock. A block with a NaN gives NaNs.
template <int BLOCKS, int WORDS>
void load_key(const word_t* section, uint32_t first, uint32_t row, uint32_t blocks, uint32_t target, word_t words[WORDS]) {
    FASTCAR_NO_INLINE
    word_t head[BLOCKS];
    word_t mantissas[BLOCKS * BLOCK_WORDS];
    const uint32_t tile = first + row / KEY_ROWS * (blocks + KEY_ROWS * blocks * BLOCK_WORDS);
    read_tile<BLOCKS>(section, tile, blocks, head);
    read_tile<BLOCKS * BLOCK_WORDS>(section, tile + blocks + row % KEY_ROWS * blocks * BLOCK_WORDS, blocks * BLOCK_WORDS,
                                    mantissas);
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
        unpack_int8(mantissas[i / FLOAT_LANES], lanes);
        unpack_int8(head[i / BLOCK_FLOAT_WORDS], exponents);
        const int8_t exponent = exponents[row % KEY_ROWS];
        const bool known = exponent != BLOCK_OF_NAN;
        const float scale = gate::power_of_two(known ? exponent : 0);
        FASTCAR_UNROLL
        for (int c = 0; c < FLOAT_LANES; ++c) {
            const float value = static_cast<float>(lanes[i % FLOAT_LANES * FLOAT_LANES + c]) * scale;
            values[c] = known ? value : float_of_bits(gate::NOT_A_NUMBER);
        }
        words[target + i] = pack_float(values);
    }
}

// Words of a block of values and of the exponents of all blocks, on one port.
template <int BLOCKS, int PORTS>
struct ValueTile {
    static const int SLOTS = (BLOCK + PORTS - 1) / PORTS;
    static const int HEAD = (2 * BLOCKS + PORTS - 1) / PORTS;
    static const int WORDS = HEAD + 2 * BLOCKS * SLOTS;
};

// Where the loop over a tile of values is: of the words of exponents (2 * block + half, over all ports), or of mantissas.
struct TilePlace {
    uint32_t number;   // of the word of exponents
    uint32_t half;     // of the positions: words of mantissas alternate
    uint32_t element;  // of the block
    uint32_t base;     // first element of the block
};

// Port `port` gets every PORTS-th element of each block of the value at `position`, a byte of every other word of the tile,
// and the exponents whose turn it is. The tile is read in one burst and written in another.
template <int BLOCKS, int PORTS>
void append_value(const int8_t mantissas[BLOCKS * BLOCK], const int8_t exponents[BLOCKS], uint32_t blocks, uint32_t head_words,
                  uint32_t first, uint32_t position, uint32_t port, word_t* section) {
    FASTCAR_NO_INLINE
    typedef ValueTile<BLOCKS, PORTS> Tile;
    word_t tile[Tile::WORDS];
    const uint32_t words = head_words + 2 * blocks * Tile::SLOTS;
    const uint32_t at = first + position / TILE * words;
    const uint32_t half = position % TILE / INT8_LANES;
    const uint32_t lane = position % INT8_LANES;
    read_tile<Tile::WORDS>(section, at, words, tile);
    TilePlace now = {port, 0, port, 0};
write_tile:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, Tile::WORDS)
        const bool head = i < head_words;
        const uint32_t block = now.number >> 1;
        const bool exponent = head && (now.number & 1u) == half && block < blocks;
        const bool mantissa = !head && now.half == half && now.element < BLOCK;
        const int8_t value = exponent ? exponents[block] : mantissa ? mantissas[now.base + now.element] : int8_t(0);
        section[at + i] = exponent || mantissa ? replace_step(tile[i], lane, value) : tile[i];
        const bool last_of_element = !head && now.half == 1;
        const bool last_of_block = last_of_element && now.element + PORTS >= static_cast<uint32_t>(Tile::SLOTS) * PORTS;
        now.number += head ? static_cast<uint32_t>(PORTS) : 0u;
        now.half = head || last_of_element ? 0 : 1;
        now.element = last_of_block ? port : last_of_element ? now.element + PORTS : now.element;
        now.base += last_of_block ? static_cast<uint32_t>(BLOCK) : 0u;
    }
}

}  // namespace cache
}  // namespace fastcar

#endif
