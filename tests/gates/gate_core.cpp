// Scores of rows by fastcar_gate_core.hpp, for ctypes. Words lie behind each other, row after row.
#include "fastcar_network_core.hpp"

using namespace fastcar;

static const int WORDS = 4096;
static const int UNITS = 64;

static const word_t* words_of(const float* values) { return reinterpret_cast<const word_t*>(values); }

extern "C" void change_scores(const float* x, const float* cached, uint32_t rows, uint32_t words, float* scores) {
    gate::change_scores<WORDS>(words_of(x), words_of(cached), rows, words, scores);
    for (uint32_t row = 0; row < rows; ++row) {
        scores[row] = -scores[row];
    }
}

// The network lies behind the cached rows.
extern "C" void learned_scores(const float* x, const float* cached, const uint32_t* shape, float* scores) {
    const uint32_t rows = shape[0], words = shape[1];
    gate::network_scores<WORDS, UNITS>(words_of(x), words_of(cached), rows, words, words_of(cached), rows * words, UNITS, scores);
    for (uint32_t row = 0; row < rows; ++row) {
        scores[row] = -scores[row];
    }
}

extern "C" void square_roots(const float* values, uint32_t count, float* roots) {
    for (uint32_t i = 0; i < count; ++i) {
        roots[i] = gate::square_root(values[i]);
    }
}
