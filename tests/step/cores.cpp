// The functions of the decode step's cores for ctypes, at the sizes of the tests.
#include "fastcar_cache_core.hpp"
#include "fastcar_row_core.hpp"
#include "fastcar_step_program.hpp"

using fastcar::word_t;

namespace {

const int WORDS = 64;
const int BLOCKS = 4;
const uint32_t TURNED = 5;  // number of the head

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
        fastcar::cache::append_key<BLOCKS, PORTS, 1>(mantissas, exponents, blocks, 0, position, TURNED % PORTS, port, key_section);
        fastcar::cache::append_value<BLOCKS, PORTS, 1>(mantissas, exponents, blocks, head_words, 0, position, port,
                                                       value_section);
    }
}

// LIMITS of programs.py.
struct Limits {
    static const int CORES = 1, ROWS = 32, TABLE_WORDS = 64, QUERY_WORDS = 1, KEY_WORDS = 1, UNITS = 1, INSTRUCTIONS = 64;
    static const uint32_t GATE = fastcar::drs::GATE_TAS, HEADS = 0;
};

}  // namespace

extern "C" {

// rows: y, then x.
void step_add(word_t rows[2][WORDS], uint32_t words) {
    fastcar::row::add_row<WORDS, WORDS>(rows[0], words, rows[1]);
}

void step_rotate(word_t y[WORDS], const word_t* cosine, const word_t* sine, uint32_t words, uint32_t head_words, uint32_t half_words) {
    const fastcar::row::Rotation shape = {0, words / head_words * half_words, head_words, half_words};
    fastcar::row::rotate_row<WORDS, WORDS>(cosine, sine, shape, y);
}

// rows: x, then a.
void step_normalize(word_t rows[2][WORDS], uint32_t first, uint32_t words, const word_t* weight, float inverse_size, float epsilon) {
    word_t kept[WORDS];
    fastcar::norm::normalize<WORDS, WORDS, WORDS, WORDS>(rows[0], false, false, first, words, weight, 0, words, inverse_size, epsilon, kept,
                                                         rows[1], rows[1]);
}

void step_center(word_t rows[2][WORDS], uint32_t first, uint32_t words, float inverse_size) {
    fastcar::norm::center<WORDS, WORDS, WORDS>(rows[0], false, first, words, inverse_size, rows[1], rows[1]);
}

// A table with a program of at most 64 instructions; returns the status.
uint32_t step_load(const word_t* memory, uint32_t bytes) {
    static fastcar::step::Program<64> program;
    static uint32_t header[fastcar::drs::HEADER_WORDS], words[Limits::TABLE_WORDS];
    const uint32_t status = fastcar::drs::load_table<Limits>(memory, bytes, header, words);
    return status == fastcar::drs::OK ? fastcar::step::load<Limits::INSTRUCTIONS>(memory, header, program) : status;
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
        case 120:
            append<120>(row, first, blocks, position, keys, key_words, values, value_words);
            return 1;
        default:
            return 0;
    }
}

}  // extern "C"
