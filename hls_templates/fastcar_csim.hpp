// What the C simulation entries share. Not synthesised.
#ifndef FASTCAR_CSIM_HPP
#define FASTCAR_CSIM_HPP

#include <stdint.h>
#include <string.h>

#include <vector>

#include "fastcar_mlp_core.hpp"

namespace fastcar {
namespace csim {

typedef std::vector<word_t> Words;

template <class C>
Words rows_to_words(const float* rows) {
    const int row_words = Shapes<C>::ROW_WORDS;
    Words words(C::BATCH * row_words, word_t(0));
    for (int row = 0; row < C::BATCH; ++row) {
        memcpy(static_cast<void*>(&words[row * row_words]), rows + row * C::HIDDEN, sizeof(float) * C::HIDDEN);
    }
    return words;
}

// One row through one stage, by the kernel's own cores: acc [N][SUMS], value [N].
template <class C, class S>
void run_stage(const word_t* weights, int first, const std::vector<float>& x, int32_t* acc, std::vector<float>& value) {
    static int8_t q[S::ROWS][S::CHANNEL_WORDS][S::LANES];
    static word_t head[S::PORTS][S::HEAD_WORDS];
    static word_t tile[S::PORTS][S::TILE_WORDS];
    static int32_t sums[S::ROWS][S::PORTS][S::TILE_SUMS];
    static float values[S::ROWS][S::PORTS][S::TILE];
    float row_scale[S::ROWS] = {};
    row_scale[0] = quantize_row<S::K, S::CHANNEL_WORDS, S::LANES>(x.data(), q[0]);
    value.assign(S::N, 0.0f);
    for (int t = 0; t < S::TILES; ++t) {
        for (int p = 0; p < S::PORTS; ++p) {
            const word_t* at = weights + p * Shapes<C>::SECTION_WORDS + first + t * (S::HEAD_WORDS + S::TILE_WORDS);
            for (int i = 0; i < S::HEAD_WORDS; ++i) head[p][i] = at[i];
            for (int i = 0; i < S::TILE_WORDS; ++i) tile[p][i] = at[S::HEAD_WORDS + i];
        }
        mac_tile<S>(tile, q, 1, sums);
        scale_tile<S>(head, sums, row_scale, 1, values);
        for (int i = 0; i < S::TILE * S::PORTS; ++i) {
            const int c = t * S::TILE * S::PORTS + i;
            if (c >= S::N) continue;
            const int j = i / S::PORTS;
            memcpy(acc + c * S::SUMS, &sums[0][i % S::PORTS][j * S::SUMS], sizeof(int32_t) * S::SUMS);
            value[c] = channel_value<S>(values[0], i);
        }
    }
}

// The exact sums of one row: first [N][SUMS] of the first stage, down [HIDDEN][SUMS] of the second.
template <class C>
void accumulators(const float* x, const word_t* weights, int32_t* first, int32_t* down) {
    typedef typename Shapes<C>::GateUp GateUp;
    typedef typename Shapes<C>::Down Down;
    const std::vector<float> row(x, x + C::HIDDEN);
    std::vector<float> value, a(C::INTERMEDIATE);
    run_stage<C, GateUp>(weights, 0, row, first, value);
    for (int n = 0; n < C::INTERMEDIATE; ++n) {
        const float act = Activate<C::ACTIVATION>::of(value[Shapes<C>::PARTS * n]);
        a[n] = C::GATED ? act * value[Shapes<C>::PARTS * (n + 1) - 1] : act;
    }
    run_stage<C, Down>(weights, GateUp::PORT_WORDS, a, down, value);
}

}  // namespace csim
}  // namespace fastcar

#endif
