// Attention of a key head, tile by tile, with the kernels' own functions. For C simulation only; not synthesised.
#ifndef FASTCAR_ATTENTION_CSIM_HPP
#define FASTCAR_ATTENTION_CSIM_HPP

#include "fastcar_attention_core.hpp"

namespace fastcar {
namespace csim {

// The rows of a cache that are filled and seen when `position` is the newest one.
inline attention::Window window_of(uint32_t position, uint32_t sinks, uint32_t ring, uint32_t window) {
    const uint32_t known = position + 1;
    const uint32_t behind = known > sinks ? known - sinks : 0;
    const uint32_t kept = behind < ring ? behind : ring;
    const uint32_t count = kept < window ? kept : window;
    const attention::Window found = {known < sinks ? known : sinks, sinks + (behind - count) % ring, count, sinks,
                                     (known < sinks ? known : sinks) + kept};
    return found;
}

inline uint32_t row_of(uint32_t position, uint32_t sinks, uint32_t ring) {
    return position < sinks ? position : sinks + (position - sinks) % ring;
}

// One query row of HEADS heads over the sections of a key head, tile by tile; keys and values begin at the head's first word
// of port 0.
template <int HEADS, int PORTS, int BLOCKS, int POSITIONS, int WORDS>
void attend(const word_t* query, uint32_t first_word, uint32_t blocks, const word_t* keys, uint32_t key_section,
            const word_t* values, uint32_t value_section, const attention::Window& window, float factor, word_t* y) {
    using namespace attention;
    typedef cache::KeyTile<BLOCKS> KeyTile;
    typedef cache::ValueTile<BLOCKS, PORTS> ValueTile;
    static int8_t input[BLOCKS * cache::BLOCK_WORDS][LIMBS * HEADS][INT8_LANES];
    static int8_t exponents[HEADS][BLOCKS];
    static float logits[HEADS][POSITIONS];
    static int32_t numerators[HEADS][POSITIONS];
    for (uint32_t h = 0; h < HEADS; ++h) {
        const uint32_t word = first_word + cache::BLOCK_FLOAT_WORDS * blocks * h;
        split_query<WORDS, HEADS, BLOCKS>(query, word, blocks, h, input, exponents);
    }
    const uint32_t words = cache::BLOCK_WORDS * blocks, stride = cache::KEY_ROWS * PORTS;
    for (uint32_t first = 0; first < window.rows; first += stride) {
        static word_t tile[PORTS][KeyTile::WORDS];
        static int32_t sums[HEADS][PORTS][KeyTile::SUMS];
        const uint32_t length = blocks + cache::KEY_ROWS * words;
        const uint32_t rows = window.rows - first < stride ? window.rows - first : stride;
        for (uint32_t p = 0; p < PORTS; ++p) {
            cache::read_tile<KeyTile::WORDS>(keys + p * key_section, first / stride * length, length, tile[p]);
        }
        multiply_tile<HEADS, PORTS, KeyTile::WORDS, BLOCKS, KeyTile::SUMS>(tile, blocks, cache::KEY_ROWS * words, blocks, 1,
                                                                          input, sums);
        scale_logits<HEADS, PORTS, BLOCKS, POSITIONS>(tile, sums, exponents, blocks, first, rows, factor, logits);
    }
    float inverse[HEADS];
    for (uint32_t h = 0; h < HEADS; ++h) {
        const Largest largest = largest_logit<POSITIONS>(logits[h], window);
        const int64_t sum = exponentials<POSITIONS>(logits[h], window, float_of_ordered(largest.value), numerators[h]);
        inverse[h] = inverse_of_sum(sum, largest);
    }
    static float total[HEADS][PORTS][Totals<BLOCKS, PORTS>::ENTRIES];
    const uint32_t head_words = (words + PORTS - 1) / PORTS, count = words * ValueTile::SLOTS;
    uint32_t unknown = 0;
    for (uint32_t first = 0; first < window.rows; first += cache::TILE) {
        static word_t tile[PORTS][ValueTile::WORDS];
        static int32_t sums[HEADS][PORTS][Totals<BLOCKS, PORTS>::SUMS];
        const uint32_t at = first / cache::TILE * (head_words + count);
        for (uint32_t p = 0; p < PORTS; ++p) {
            cache::read_tile<ValueTile::WORDS>(values + p * value_section, at, head_words + count, tile[p]);
        }
        unknown |= weights_of_tile<HEADS, PORTS, BLOCKS, POSITIONS>(tile, numerators, blocks, first, window, input, exponents);
        multiply_tile<HEADS, PORTS, ValueTile::WORDS, BLOCKS, Totals<BLOCKS, PORTS>::SUMS>(
            tile, head_words, count, blocks, ValueTile::SLOTS, input, sums);
        add_tile<HEADS, PORTS, BLOCKS>(sums, exponents, blocks, first == 0, total);
    }
    for (uint32_t h = 0; h < HEADS; ++h) {
        finish_head<HEADS, PORTS, BLOCKS, WORDS>(total, h, blocks, unknown, inverse[h],
                                                 first_word + cache::BLOCK_FLOAT_WORDS * blocks * h, y);
    }
}

}  // namespace csim
}  // namespace fastcar

#endif
