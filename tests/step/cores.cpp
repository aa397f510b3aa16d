// The functions of the decode step's cores for ctypes, at the sizes of the tests.
#include "fastcar_cache_core.hpp"
#include "fastcar_norm_core.hpp"
#include "fastcar_row_core.hpp"
#include "fastcar_step_program.hpp"

using fastcar::word_t;

namespace {

const int WORDS = 64;
const int BLOCKS = 4;

template <int PORTS>
void append(const word_t* row, uint32_t first, uint32_t blocks, uint32_t position, word_t* keys, uint32_t key_words,
            word_t* values, uint32_t value_words) {
    int8_t mantissas[BLOCKS * fastcar::cache::BLOCK];
    int8_t exponents[BLOCKS];
    fastcar::cache::quantize_head<WORDS, BLOCKS>(row, first, 8 * blocks, mantissas, exponents);
    const uint32_t head_words = (2 * blocks + PORTS - 1) / PORTS;
    for (uint32_t port = 0; port < PORTS; ++port) {
        word_t* key_section = keys + port * key_words;
        word_t* value_section = values + port * value_words;
        fastcar::cache::append_key<BLOCKS, PORTS>(mantissas, exponents, blocks, 0, position, port, key_section);
        fastcar::cache::append_value<BLOCKS, PORTS>(mantissas, exponents, blocks, head_words, 0, position, port,
                                                    value_section);
    }
}

}  // namespace

extern "C" {

void step_add(word_t* x, const word_t* y, uint32_t words) { fastcar::row::add_row<WORDS>(x, y, words); }

void step_rotate(const word_t* from, const word_t* cosine, const word_t* sine, uint32_t words, uint32_t head_words,
                 uint32_t half_words, word_t* to) {
    const fastcar::row::Rotation shape = {words, head_words, half_words};
    fastcar::row::rotate_row<WORDS, WORDS>(from, cosine, sine, shape, to);
}

void step_normalize(const word_t* x, uint32_t first, uint32_t words, const word_t* weight, float inverse_size, float epsilon,
                    word_t* y) {
    fastcar::norm::normalize<WORDS, WORDS>(x, first, words, weight, inverse_size, epsilon, y);
}

// A program of at most 64 instructions; returns the status.
uint32_t step_load(const word_t* memory, uint32_t bytes) {
    static fastcar::step::Program<64> program;
    return fastcar::step::load<64>(memory, bytes, program);
}

// Returns 0 for a number of ports that is not here.
int step_append(uint32_t ports, const word_t* row, uint32_t first, uint32_t blocks, uint32_t position, word_t* keys,
                uint32_t key_words, word_t* values, uint32_t value_words) {
    switch (ports) {
        case 1:
            append<1>(row, first, blocks, position, keys, key_words, values, value_words);
            return 1;
        case 3:
            append<3>(row, first, blocks, position, keys, key_words, values, value_words);
            return 1;
        case 4:
            append<4>(row, first, blocks, position, keys, key_words, values, value_words);
            return 1;
        default:
            return 0;
    }
}

}  // extern "C"
