// Compute cores of the MLP: plain functions over words and arrays, no streams.
//
// A stage is one matrix product, N output channels by K inputs. Channel c = (t * TILE + j) * PORTS + p is row j of tile t
// on weight port p, so a tile is TILE rows on every port. In the first stage of a gated MLP channel 2n is gate n and
// 2n + 1 is up n. Before its rows a tile has its head: the scales, then (if the stage has them) the float32 biases.
#ifndef FASTCAR_MLP_CORE_HPP
#define FASTCAR_MLP_CORE_HPP

#include "fastcar_activation.hpp"
#include "fastcar_mac.hpp"
#include "fastcar_numerics.hpp"

namespace fastcar {

// w8a8: 16 weights per word, one float32 scale per channel.
struct Int8Channels {
    static const int LANES = INT8_LANES;
    static const int SCALE_LANES = FLOAT_LANES;
    static const int GROUP = 1 << 16;  // all of a channel
    static void unpack(const word_t& word, int8_t lanes[LANES]) {
        FASTCAR_INLINE
        unpack_int8(word, lanes);
    }
};

// w4a8: 32 weights per word, one float16 scale per group of 128.
struct Int4Groups {
    static const int LANES = INT4_LANES;
    static const int SCALE_LANES = HALF_LANES;
    static const int GROUP = 128;
    static void unpack(const word_t& word, int8_t lanes[LANES]) {
        FASTCAR_INLINE
        unpack_int4(word, lanes);
    }
};

template <int BITS>
struct WeightFormat;
template <>
struct WeightFormat<8> {
    typedef Int8Channels Type;
};
template <>
struct WeightFormat<4> {
    typedef Int4Groups Type;
};

// Bounds of the loops over one tile. The MLP kernel's are constants, those of its stage; the engine's come with a call,
// and its stage has the largest.
struct Bounds {
    int tile;
    int sums;
    int sum_words;
    int channel_words;
    int scale_words;
    int head_words;
    int tile_words;
    bool bias;
};

template <class Format_, int K_, int N_, int TILE_, int TILES_, int PORTS_, int ROWS_, bool BIAS_>
struct Stage {
    typedef Format_ Format;
    static const int K = K_;
    static const int N = N_;
    static const int TILE = TILE_;
    static const int TILES = TILES_;
    static const int PORTS = PORTS_;
    static const int ROWS = ROWS_;
    static const bool BIAS = BIAS_;
    static const int LANES = Format::LANES;
    // Sums of a channel: one, or one per group; padding makes the groups whole.
    static const int SUMS = WordsFor<K_, Format::GROUP>::VALUE;
    static const int SUM_WORDS = Format::GROUP == 128 ? 128 / LANES : WordsFor<K_, LANES>::VALUE;
    static const int CHANNEL_WORDS = SUMS * SUM_WORDS;
    static const int SCALE_WORDS = WordsFor<TILE_ * SUMS, Format::SCALE_LANES>::VALUE;
    static const int HEAD_WORDS = SCALE_WORDS + (BIAS_ ? WordsFor<TILE_, FLOAT_LANES>::VALUE : 0);
    static const int TILE_WORDS = TILE_ * CHANNEL_WORDS;
    static const int TILE_SUMS = TILE_ * SUMS;
    static const int PORT_WORDS = TILES_ * (HEAD_WORDS + TILE_WORDS);
    // Rows that the group scaling takes side by side, so that it keeps pace with the four words of a group.
    static const int ROW_LANES = (ROWS_ + 3) / 4;
    static const int ROW_BLOCKS = (ROWS_ + ROW_LANES - 1) / ROW_LANES;
    static Bounds bounds() {
        FASTCAR_INLINE
        const Bounds all = {TILE, SUMS, SUM_WORDS, CHANNEL_WORDS, SCALE_WORDS, HEAD_WORDS, TILE_WORDS, BIAS};
        return all;
    }
    static_assert(TILES_ * TILE_ * PORTS_ >= N_, "tiles must cover every channel");
    static_assert(K_ <= 1 << 16, "an int32 sum holds 65536 products of int8");
};

// Everything that follows from the generated configuration C.
template <class C>
struct Shapes {
    typedef typename WeightFormat<C::WEIGHT_BITS>::Type Format;
    static const int ROWS = (C::BATCH + C::CORES - 1) / C::CORES;
    static const int ROW_WORDS = WordsFor<C::HIDDEN, FLOAT_LANES>::VALUE;
    static const int PARTS = C::GATED ? 2 : 1;
    typedef Stage<Format, C::HIDDEN, PARTS * C::INTERMEDIATE, C::GATE_UP_TILE, C::GATE_UP_TILES, C::PORTS, ROWS,
                  C::UP_BIAS>
        GateUp;
    typedef Stage<Format, C::INTERMEDIATE, C::HIDDEN, C::DOWN_TILE, C::DOWN_TILES, C::PORTS, ROWS, C::DOWN_BIAS> Down;
    static const int PORT_WORDS = GateUp::PORT_WORDS + Down::PORT_WORDS;
    // A section starts at a multiple of 4 KiB: no AXI burst may cross one.
    static const int SECTION_WORDS = (PORT_WORDS + 255) / 256 * 256;
    static_assert(C::BATCH >= 1 && C::BATCH <= 32, "the Index Register has 32 bits");
    static_assert((C::GATE_UP_TILE * C::PORTS) % PARTS == 0, "gate n and up n must share a tile");
};

// The MAC array: PORTS * LANES lanes for each of ROWS rows, one word of every port per clock. A sum ends after SUM_WORDS
// words. Rows at or beyond `rows` idle.
template <class S>
void mac_tile(const word_t tile[S::PORTS][S::TILE_WORDS], const int8_t q[S::ROWS][S::CHANNEL_WORDS][S::LANES], int rows,
              int32_t acc[S::ROWS][S::PORTS][S::TILE_SUMS], Bounds bounds = S::bounds()) {
    FASTCAR_NO_INLINE
    int32_t partial[S::ROWS][S::PORTS];
    FASTCAR_PARTITION(partial, 0)
    for (int i = 0, sum = 0, k = 0, word = 0; i < bounds.tile_words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, S::TILE_WORDS)
        int8_t weight[S::PORTS][S::LANES];
        int8_t input[S::ROWS][S::LANES] = {};
        int32_t product[S::ROWS][S::PORTS] = {};
        FASTCAR_PARTITION(weight, 0)
        FASTCAR_PARTITION(input, 0)
        FASTCAR_PARTITION(product, 0)
        for (int p = 0; p < S::PORTS; ++p) {
            FASTCAR_UNROLL
            S::Format::unpack(tile[p][i], weight[p]);
        }
        for (int r = 0; r < S::ROWS; ++r) {
            FASTCAR_UNROLL
            if (r < rows) {
                store_lanes<S::LANES>(q[r][k], input[r]);
            }
        }
        multiply_words<S::PORTS, S::ROWS, S::LANES>(weight, input, rows, product);
        for (int r = 0; r < S::ROWS; ++r) {
            FASTCAR_UNROLL
            for (int p = 0; p < S::PORTS; ++p) {
                FASTCAR_UNROLL
                partial[r][p] = (word == 0 ? 0 : partial[r][p]) + product[r][p];
                acc[r][p][sum] = partial[r][p];
            }
        }
        const bool last = word == bounds.sum_words - 1;
        word = last ? 0 : word + 1;
        sum += last ? 1 : 0;
        k = k == bounds.channel_words - 1 ? 0 : k + 1;
    }
}

template <class S>
float with_bias(const word_t head[S::PORTS][S::HEAD_WORDS], int p, int j, float value, Bounds bounds) {
    FASTCAR_INLINE
    return bounds.bias ? value + unpack_float(head[p][bounds.scale_words + j / FLOAT_LANES], j % FLOAT_LANES) : value;
}

// Sums of a tile -> values: int8 weights. Nothing stands between the loops of a nest, so that they flatten into one
// pipeline: one value per clock, not one pipeline depth per channel.
template <class S>
void scale_sums(Int8Channels, const word_t head[S::PORTS][S::HEAD_WORDS],
                const int32_t acc[S::ROWS][S::PORTS][S::TILE_SUMS], const float row_scale[S::ROWS], int rows,
                float value[S::ROWS][S::PORTS][S::TILE], Bounds bounds) {
    FASTCAR_INLINE
    for (int i = 0; i < bounds.tile * S::PORTS; ++i) {
        FASTCAR_TRIPS(1, S::TILE * S::PORTS)
        for (int r = 0; r < S::ROWS; ++r) {
            FASTCAR_PIPELINE(1)
            const int p = i % S::PORTS;
            const int j = i / S::PORTS;
            if (r < rows) {
                const float scale = unpack_float(head[p][j / FLOAT_LANES], j % FLOAT_LANES);
                value[r][p][j] = with_bias<S>(head, p, j, dequantize(acc[r][p][j], row_scale[r], scale), bounds);
            }
        }
    }
}

// Sums of a tile -> values: int4 weights. The groups of a channel are added in ascending order; between two of them lie
// the tile's other rows, so that the adder's latency is hidden.
template <class S>
void scale_sums(Int4Groups, const word_t head[S::PORTS][S::HEAD_WORDS],
                const int32_t acc[S::ROWS][S::PORTS][S::TILE_SUMS], const float row_scale[S::ROWS], int rows,
                float value[S::ROWS][S::PORTS][S::TILE], Bounds bounds) {
    FASTCAR_INLINE
    float total[S::ROWS][S::PORTS][S::TILE];
    FASTCAR_PARTITION(total, 1)
    FASTCAR_PARTITION(total, 2)
    for (int g = 0; g < bounds.sums; ++g) {
        FASTCAR_TRIPS(1, S::TILE_SUMS)
        for (int j = 0; j < bounds.tile; ++j) {
            FASTCAR_TRIPS(1, S::TILE)
            for (int block = 0; block < S::ROW_BLOCKS; ++block) {
                FASTCAR_PIPELINE(1)
                const int at = j * bounds.sums + g;
                for (int p = 0; p < S::PORTS; ++p) {
                    FASTCAR_UNROLL
                    const float scale = unpack_half(head[p][at / HALF_LANES], at % HALF_LANES);
                    for (int lane = 0; lane < S::ROW_LANES; ++lane) {
                        FASTCAR_UNROLL
                        const int r = block * S::ROW_LANES + lane;
                        if (r < rows) {
                            const float part = static_cast<float>(acc[r][p][at]) * scale;
                            total[r][p][j] = g == 0 ? part : total[r][p][j] + part;
                        }
                    }
                }
            }
        }
    }
    for (int i = 0; i < bounds.tile * S::PORTS; ++i) {
        FASTCAR_TRIPS(1, S::TILE * S::PORTS)
        for (int r = 0; r < S::ROWS; ++r) {
            FASTCAR_PIPELINE(1)
            const int p = i % S::PORTS;
            const int j = i / S::PORTS;
            if (r < rows) {
                value[r][p][j] = with_bias<S>(head, p, j, total[r][p][j] * row_scale[r], bounds);
            }
        }
    }
}

template <class S>
void scale_tile(const word_t head[S::PORTS][S::HEAD_WORDS], const int32_t acc[S::ROWS][S::PORTS][S::TILE_SUMS],
                const float row_scale[S::ROWS], int rows, float value[S::ROWS][S::PORTS][S::TILE],
                Bounds bounds = S::bounds()) {
    FASTCAR_NO_INLINE
    scale_sums<S>(typename S::Format(), head, acc, row_scale, rows, value, bounds);
}

// Value of a channel of the tile. PORTS is a power of two, so the divisions are wires.
template <class S>
float channel_value(const float value[S::PORTS][S::TILE], int channel) {
    FASTCAR_INLINE
    return value[channel % S::PORTS][channel / S::PORTS];
}

// Values of tile t -> the activated neurons a[row][n] in that tile: act(gate) * up, or act(up).
template <class C>
void finish_gate_up(const float value[Shapes<C>::ROWS][C::PORTS][C::GATE_UP_TILE], int rows, int t,
                    float a[Shapes<C>::ROWS][C::INTERMEDIATE]) {
    FASTCAR_NO_INLINE
    typedef typename Shapes<C>::GateUp S;
    const int neurons = S::TILE * S::PORTS / Shapes<C>::PARTS;
    for (int i = 0; i < S::TILE * S::PORTS / Shapes<C>::PARTS; ++i) {
        for (int r = 0; r < S::ROWS; ++r) {
            FASTCAR_PIPELINE(1)
            const int n = t * neurons + i;
            if (r < rows && n < C::INTERMEDIATE) {
                const float act = Activate<C::ACTIVATION>::of(channel_value<S>(value[r], Shapes<C>::PARTS * i));
                a[r][n] = C::GATED ? act * channel_value<S>(value[r], Shapes<C>::PARTS * i + Shapes<C>::PARTS - 1) : act;
            }
        }
    }
}

// Values of tile t -> the outputs y[row][c] of the channels in that tile.
template <class S>
void finish_down(const float value[S::ROWS][S::PORTS][S::TILE], int rows, int t, float y[S::ROWS][S::N]) {
    FASTCAR_NO_INLINE
    for (int i = 0; i < S::TILE * S::PORTS; ++i) {
        for (int r = 0; r < S::ROWS; ++r) {
            FASTCAR_PIPELINE(1)
            const int c = t * (S::TILE * S::PORTS) + i;
            if (r < rows && c < S::N) {
                y[r][c] = channel_value<S>(value[r], i);
            }
        }
    }
}

template <class S>
void quantize_rows(const float x[S::ROWS][S::K], int rows, int8_t q[S::ROWS][S::CHANNEL_WORDS][S::LANES],
                   float row_scale[S::ROWS]) {
    FASTCAR_NO_INLINE
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, S::ROWS)
        row_scale[r] = quantize_row<S::K, S::CHANNEL_WORDS, S::LANES>(x[r], q[r]);
    }
}

}  // namespace fastcar

#endif
