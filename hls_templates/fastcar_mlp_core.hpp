// Compute cores of the SwiGLU w8a8 MLP: plain functions over words and arrays, no streams.
//
// A stage is one matrix product, N output channels by K inputs. Channel c = (t * TILE + j) * PORTS + p is row j of tile t
// on weight port p, so a tile is TILE rows on every port. In the first stage channel 2n is gate n and 2n + 1 is up n.
#ifndef FASTCAR_MLP_CORE_HPP
#define FASTCAR_MLP_CORE_HPP

#include "fastcar_numerics.hpp"

namespace fastcar {

template <int K_, int N_, int TILE_, int TILES_, int PORTS_, int ROWS_>
struct Stage {
    static const int K = K_;
    static const int N = N_;
    static const int TILE = TILE_;
    static const int TILES = TILES_;
    static const int PORTS = PORTS_;
    static const int ROWS = ROWS_;
    static const int CHANNEL_WORDS = WordsFor<K_, INT8_LANES>::VALUE;
    static const int SCALE_WORDS = WordsFor<TILE_, FLOAT_LANES>::VALUE;
    static const int TILE_WORDS = TILE_ * CHANNEL_WORDS;
    static const int PORT_WORDS = TILES_ * (SCALE_WORDS + TILE_WORDS);
    static_assert(TILES_ * TILE_ * PORTS_ >= N_, "tiles must cover every channel");
};

// Everything that follows from the generated configuration C.
template <class C>
struct Shapes {
    static const int ROWS = (C::BATCH + C::CORES - 1) / C::CORES;
    static const int ROW_WORDS = WordsFor<C::HIDDEN, FLOAT_LANES>::VALUE;
    typedef Stage<C::HIDDEN, 2 * C::INTERMEDIATE, C::GATE_UP_TILE, C::GATE_UP_TILES, C::PORTS, ROWS> GateUp;
    typedef Stage<C::INTERMEDIATE, C::HIDDEN, C::DOWN_TILE, C::DOWN_TILES, C::PORTS, ROWS> Down;
    static const int PORT_WORDS = GateUp::PORT_WORDS + Down::PORT_WORDS;
    static_assert(C::BATCH >= 1 && C::BATCH <= 32, "the Index Register has 32 bits");
    static_assert((C::GATE_UP_TILE * C::PORTS) % 2 == 0, "gate n and up n must share a tile");
};

inline int32_t dot(const int8_t weight[INT8_LANES], const int8_t input[INT8_LANES]) {
    FASTCAR_INLINE
    int32_t sum = 0;
    for (int i = 0; i < INT8_LANES; ++i) {
        FASTCAR_UNROLL
        const int16_t product = static_cast<int16_t>(weight[i] * input[i]);
        FASTCAR_MULTIPLY_IN_DSP(product)
        sum += product;
    }
    return sum;
}

// The MAC array: PORTS * 16 lanes for each of ROWS rows, one word of every port per clock. Rows at or beyond `rows` idle.
template <class S>
void mac_tile(const word_t tile[S::PORTS][S::TILE_WORDS], const int8_t q[S::ROWS][S::CHANNEL_WORDS][INT8_LANES],
              int rows, int32_t acc[S::ROWS][S::PORTS][S::TILE]) {
    FASTCAR_NO_INLINE
    int32_t partial[S::ROWS][S::PORTS];
    FASTCAR_PARTITION(partial, 0)
    for (int i = 0, j = 0, k = 0; i < S::TILE_WORDS; ++i) {
        FASTCAR_PIPELINE(1)
        for (int p = 0; p < S::PORTS; ++p) {
            FASTCAR_UNROLL
            int8_t weight[INT8_LANES];
            FASTCAR_PARTITION(weight, 0)
            unpack_int8(tile[p][i], weight);
            for (int r = 0; r < S::ROWS; ++r) {
                FASTCAR_UNROLL
                if (r < rows) {
                    partial[r][p] = (k == 0 ? 0 : partial[r][p]) + dot(weight, q[r][k]);
                    acc[r][p][j] = partial[r][p];
                }
            }
        }
        const bool last = k == S::CHANNEL_WORDS - 1;
        j += last ? 1 : 0;
        k = last ? 0 : k + 1;
    }
}

// One channel of the tile, dequantised. PORTS is a power of two, so the divisions are wires.
template <class S>
float channel_value(const word_t scales[S::PORTS][S::SCALE_WORDS], const int32_t acc[S::PORTS][S::TILE],
                    float row_scale, int channel) {
    FASTCAR_INLINE
    const int p = channel % S::PORTS;
    const int j = channel / S::PORTS;
    return dequantize(acc[p][j], row_scale, unpack_float(scales[p][j / FLOAT_LANES], j % FLOAT_LANES));
}

// Accumulators of tile t -> the gated activation a[row][n] of the neurons in that tile. Nothing stands between the two
// loops, so that they flatten into one pipeline: one value per clock, not one pipeline depth per neuron.
template <class S>
void finish_gate_up(const word_t scales[S::PORTS][S::SCALE_WORDS], const int32_t acc[S::ROWS][S::PORTS][S::TILE],
                    const float row_scale[S::ROWS], int rows, int t, float a[S::ROWS][S::N / 2]) {
    FASTCAR_NO_INLINE
    for (int i = 0; i < S::TILE * S::PORTS / 2; ++i) {
        for (int r = 0; r < S::ROWS; ++r) {
            FASTCAR_PIPELINE(1)
            const int n = t * (S::TILE * S::PORTS / 2) + i;
            if (r < rows && n < S::N / 2) {
                const float g = channel_value<S>(scales, acc[r], row_scale[r], 2 * i);
                const float u = channel_value<S>(scales, acc[r], row_scale[r], 2 * i + 1);
                a[r][n] = gated_silu(g, u);
            }
        }
    }
}

// Accumulators of tile t -> the outputs y[row][c] of the channels in that tile.
template <class S>
void finish_down(const word_t scales[S::PORTS][S::SCALE_WORDS], const int32_t acc[S::ROWS][S::PORTS][S::TILE],
                 const float row_scale[S::ROWS], int rows, int t, float y[S::ROWS][S::N]) {
    FASTCAR_NO_INLINE
    for (int i = 0; i < S::TILE * S::PORTS; ++i) {
        for (int r = 0; r < S::ROWS; ++r) {
            FASTCAR_PIPELINE(1)
            const int c = t * (S::TILE * S::PORTS) + i;
            if (r < rows && c < S::N) {
                y[r][c] = channel_value<S>(scales, acc[r], row_scale[r], i);
            }
        }
    }
}

template <class S>
void quantize_rows(const float x[S::ROWS][S::K], int rows, int8_t q[S::ROWS][S::CHANNEL_WORDS][INT8_LANES],
                   float row_scale[S::ROWS]) {
    FASTCAR_NO_INLINE
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, S::ROWS)
        row_scale[r] = quantize_row<S::K>(x[r], q[r]);
    }
}

}  // namespace fastcar

#endif
