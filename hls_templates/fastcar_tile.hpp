// One tile of a matrix product: multiply, then scale. Plain functions over words and arrays, no streams.
//
// A product is N output channels by K inputs. Channel c = (t * tile + j) * PORTS + p is row j of tile t on weight port p,
// so a tile is `tile` rows on every port. Before its rows a tile has its head: the scales, then (if the product has them)
// the float32 biases. S holds the largest sizes (fastcar_engine_core.hpp, Shapes): those of the buffers.
#ifndef FASTCAR_TILE_HPP
#define FASTCAR_TILE_HPP

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

// Bounds of the loops over one tile; they come with a call.
struct Bounds {
    int tile;           // rows on one port
    int sums;           // of one channel: one, or one per group
    int sum_words;      // words of weights that one sum takes
    int channel_words;  // words of one channel's weights
    int scale_words;    // words of the tile's scales on one port
    int head_words;     // the same with biases
    int tile_words;     // words of the tile's weights on one port
    bool bias;
};

// The MAC array: PORTS * LANES lanes for each of ROWS rows. Rows at or beyond `rows` idle.
// i: words of the tile, pipelined, one word of every port per clock; unrolled: ports, rows, lanes. `partial` is in
// registers; a sum ends after sum_words words.
template <class S>
void mac_tile(const word_t tile[S::PORTS][S::TILE_WORDS], const int8_t q[S::ROWS][S::CHANNEL_WORDS][S::LANES], int rows,
              int32_t acc[S::ROWS][S::PORTS][S::TILE_SUMS], Bounds bounds) {
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

// Sums of a tile -> values: int8 weights.
// i: channels of the tile; r: rows. Nothing stands between the two, so that they flatten into one pipeline: one value per
// clock, not one pipeline depth per channel.
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

// Sums of a tile -> values: int4 weights.
// g: groups of a channel, added in ascending order; j: rows of the tile on a port; block: a quarter of the rows, pipelined;
// unrolled: ports, rows of a block. Between two groups of a channel lie the tile's other rows, which hides the adder's
// latency. Then i and r as for int8.
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
                Bounds bounds) {
    FASTCAR_NO_INLINE
    scale_sums<S>(typename S::Format(), head, acc, row_scale, rows, value, bounds);
}

// Value of a channel of the tile. PORTS is a power of two, so the divisions are wires.
template <class S>
float channel_value(const float value[S::PORTS][S::TILE], int channel) {
    FASTCAR_INLINE
    return value[channel % S::PORTS][channel / S::PORTS];
}

}  // namespace fastcar

#endif
