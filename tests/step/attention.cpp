// The functions of attention for ctypes, at the sizes of the tests.
#include "fastcar_attention_csim.hpp"

using fastcar::word_t;

namespace {

const int WORDS = 64;
const int BLOCKS = 4;
const int POSITIONS = 256;

template <int HEADS, int PORTS>
void run(const word_t* query, uint32_t blocks, const word_t* keys, uint32_t key_words, const word_t* values,
         uint32_t value_words, const fastcar::attention::Window& window, float factor, word_t* y) {
    fastcar::csim::attend<HEADS, PORTS, BLOCKS, POSITIONS, WORDS>(query, 0, blocks, keys, key_words, values, value_words,
                                                                  window, factor, y);
}

}  // namespace

extern "C" {

// The numerator of every difference, which are at most 0.
void step_numerators(const float* differences, uint32_t count, int32_t* numerators) {
    for (uint32_t i = 0; i < count; ++i) {
        numerators[i] = fastcar::attention::numerator_of(differences[i]);
    }
}

// Returns 0 for a number of ports or heads that is not here.
int step_attend(uint32_t ports, uint32_t heads, const word_t* query, uint32_t blocks, const word_t* keys, uint32_t key_words,
                const word_t* values, uint32_t value_words, uint32_t sinks, uint32_t begin, uint32_t count, uint32_t ring,
                uint32_t rows, float factor, word_t* y) {
    const fastcar::attention::Window window = {sinks, begin, count, ring, rows};
    switch (100 * heads + ports) {
        case 101:
            run<1, 1>(query, blocks, keys, key_words, values, value_words, window, factor, y);
            return 1;
        case 203:
            run<2, 3>(query, blocks, keys, key_words, values, value_words, window, factor, y);
            return 1;
        case 104:
            run<1, 4>(query, blocks, keys, key_words, values, value_words, window, factor, y);
            return 1;
        default:
            return 0;
    }
}

}  // extern "C"
