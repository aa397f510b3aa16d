// Compute cores of the engine: one MAC array for every matrix product of the decode step. Plain functions over words and
// arrays, no streams. Loops run to the bounds of the product at hand; buffers have the sizes of the largest.
//
// Channel c = (t * tile + j) * PORTS + p is row j of tile t on weight port p. In gate/up, channel 2n is gate n, 2n + 1 is
// up n. tile * PORTS is a multiple of four, so that the channels of a tile are whole words of y.
#ifndef FASTCAR_ENGINE_CORE_HPP
#define FASTCAR_ENGINE_CORE_HPP

#include "fastcar_mlp_core.hpp"

namespace fastcar {

static const uint32_t OP_MLP = 0;
static const uint32_t OP_LINEAR = 1;
static const uint32_t OP_LINEAR_BIAS = 2;
static const int MOST_CHANNELS = 1 << 18;

// One matrix product: the bounds of its loops.
struct Product {
    int inputs;
    int channels;
    int tile;
    int tiles;
    int channel_words;
    int tile_words;
    int scale_words;
    int header_words;
    bool paired;
    bool biased;
};

// What one call computes: products == 0 means that the request was refused, and nothing is read or written.
struct Call {
    int products;
    Product first;
    Product last;
};

// The largest bounds of configuration C.
template <class C>
struct EngineShapes {
    static const int ROWS = (C::BATCH + C::CORES - 1) / C::CORES;
    static const int PORTS = C::PORTS;
    static const int INPUTS = C::MAX_INPUTS;
    static const int CHANNEL_WORDS = WordsFor<C::MAX_INPUTS, INT8_LANES>::VALUE;
    static const int TILE = C::MAX_TILE;
    static const int TILE_WORDS = C::MAX_TILE_WORDS;
    static const int SCALE_WORDS = WordsFor<C::MAX_TILE, FLOAT_LANES>::VALUE;
    static const int HEADER_WORDS = 2 * SCALE_WORDS;
    static const int RESULT_WORDS = WordsFor<C::MAX_TILE * C::PORTS, FLOAT_LANES>::VALUE;
    static const int MOST_BEATS = MOST_CHANNELS * CHANNEL_WORDS;
    static_assert(C::BATCH >= 1 && C::BATCH <= 32, "the Index Register has 32 bits");
};

inline int words_for(int count, int lanes) {
    FASTCAR_INLINE
    return (count + lanes - 1) / lanes;
}

inline Product make_product(int inputs, int channels, int tile, int tiles, bool paired, bool biased) {
    FASTCAR_INLINE
    Product product;
    product.inputs = inputs;
    product.channels = channels;
    product.tile = tile;
    product.tiles = tiles;
    product.channel_words = words_for(inputs, INT8_LANES);
    product.tile_words = tile * product.channel_words;
    product.scale_words = words_for(tile, FLOAT_LANES);
    product.header_words = biased ? 2 * product.scale_words : product.scale_words;
    product.paired = paired;
    product.biased = biased;
    return product;
}

// Whether the buffers hold a linear and its tiles cover its channels. Nothing is multiplied before it is known to be small.
template <class C>
bool linear_fits(int inputs, int channels, int tile, int tiles) {
    FASTCAR_INLINE
    const bool small = inputs >= 1 && inputs <= C::MAX_INPUTS && tile >= 1 && tile <= C::MAX_TILE && channels >= 1 &&
                       channels <= MOST_CHANNELS && tiles >= 1 && tiles <= channels;
    const int chunk = small ? tile * C::PORTS : 0;
    const int covered = small ? tiles * chunk : 0;
    const int words = small ? tile * words_for(inputs, INT8_LANES) : 0;
    return small && words <= C::MAX_TILE_WORDS && chunk % FLOAT_LANES == 0 && covered >= channels &&
           covered - chunk < channels;
}

template <class C>
Call make_call(uint32_t op, int inputs, int channels, int tile, int tiles) {
    FASTCAR_INLINE
    Call call;
    call.first = make_product(C::HIDDEN, 2 * C::INTERMEDIATE, C::GATE_UP_TILE, C::GATE_UP_TILES, true, false);
    if (op == OP_MLP) {
        call.products = 2;
        call.last = make_product(C::INTERMEDIATE, C::HIDDEN, C::DOWN_TILE, C::DOWN_TILES, false, false);
    } else {
        const bool fits = op <= OP_LINEAR_BIAS && linear_fits<C>(inputs, channels, tile, tiles);
        call.products = fits ? 1 : 0;
        call.last = make_product(fits ? inputs : 0, fits ? channels : 0, fits ? tile : 0, fits ? tiles : 0, false,
                                 op == OP_LINEAR_BIAS);
    }
    return call;
}

inline int product_words(const Product& product) {
    FASTCAR_INLINE
    return product.tiles * (product.header_words + product.tile_words);
}

// 128-bit words that one weight port reads in a call.
inline int call_words(const Call& call) {
    FASTCAR_INLINE
    return (call.products > 1 ? product_words(call.first) : 0) + (call.products > 0 ? product_words(call.last) : 0);
}

// Inputs of one row of a call.
inline int call_inputs(const Call& call) {
    FASTCAR_INLINE
    return call.products > 1 ? call.first.inputs : call.last.inputs;
}

// As quantize_row, with the length of the product at hand.
inline float quantize_values(const float* x, int inputs, int channel_words, int8_t (*q)[INT8_LANES]) {
    FASTCAR_INLINE
    uint32_t amax = 0;
    for (int k = 0; k < inputs; ++k) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, 65536)
        const uint32_t size = bits_of_float(x[k]) & 0x7FFFFFFFu;
        amax = size > amax && size <= INFINITY_BITS ? size : amax;
    }
    const float floored = row_amax_floor(float_of_bits(amax));
    const float inverse = 127.0f / floored;
    int8_t lanes[INT8_LANES] = {};
    FASTCAR_PARTITION(lanes, 0)
    for (int k = 0; k < channel_words * INT8_LANES; ++k) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(16, 65536)
        lanes[k % INT8_LANES] = k < inputs ? quantize(x[k], inverse) : static_cast<int8_t>(0);
        if (k % INT8_LANES == INT8_LANES - 1) {
            store_lanes(lanes, q[k / INT8_LANES]);
        }
    }
    return floored * ONE_OVER_127;
}

template <class C>
void engine_quantize(const float values[EngineShapes<C>::ROWS][EngineShapes<C>::INPUTS], int rows, Product product,
                     int8_t q[EngineShapes<C>::ROWS][EngineShapes<C>::CHANNEL_WORDS][INT8_LANES],
                     float row_scale[EngineShapes<C>::ROWS]) {
    FASTCAR_NO_INLINE
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, EngineShapes<C>::ROWS)
        row_scale[r] = quantize_values(values[r], product.inputs, product.channel_words, q[r]);
    }
}

// The MAC array: PORTS * 16 lanes for each of ROWS rows, one word of every port per clock. Rows at or beyond `rows` idle.
template <class C>
void engine_mac(const word_t tile[C::PORTS][EngineShapes<C>::TILE_WORDS],
                const int8_t q[EngineShapes<C>::ROWS][EngineShapes<C>::CHANNEL_WORDS][INT8_LANES], int rows,
                Product product, int32_t acc[EngineShapes<C>::ROWS][C::PORTS][EngineShapes<C>::TILE]) {
    FASTCAR_NO_INLINE
    int32_t partial[EngineShapes<C>::ROWS][C::PORTS];
    FASTCAR_PARTITION(partial, 0)
    for (int i = 0, j = 0, k = 0; i < product.tile_words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, EngineShapes<C>::TILE_WORDS)
        for (int p = 0; p < C::PORTS; ++p) {
            FASTCAR_UNROLL
            int8_t weight[INT8_LANES];
            FASTCAR_PARTITION(weight, 0)
            unpack_int8(tile[p][i], weight);
            for (int r = 0; r < EngineShapes<C>::ROWS; ++r) {
                FASTCAR_UNROLL
                if (r < rows) {
                    partial[r][p] = (k == 0 ? 0 : partial[r][p]) + dot(weight, q[r][k]);
                    acc[r][p][j] = partial[r][p];
                }
            }
        }
        const bool last = k == product.channel_words - 1;
        j += last ? 1 : 0;
        k = last ? 0 : k + 1;
    }
}

// One channel of a tile: dequantised, with its bias. The header is the scales of the tile's rows, then their biases.
template <class C>
float engine_channel(const word_t header[C::PORTS][EngineShapes<C>::HEADER_WORDS],
                     const int32_t acc[C::PORTS][EngineShapes<C>::TILE], float row_scale, Product product,
                     int channel) {
    FASTCAR_INLINE
    const int p = channel % C::PORTS;
    const int j = channel / C::PORTS;
    const int word = j / FLOAT_LANES;
    const float value = dequantize(acc[p][j], row_scale, unpack_float(header[p][word], j % FLOAT_LANES));
    if (!product.biased) {
        return value;
    }
    return value + unpack_float(header[p][product.scale_words + word], j % FLOAT_LANES);
}

// Accumulators of tile t -> gated activations in `values` (gate/up), or whole words of y in `results`. One channel per
// clock: a neuron takes two, so that all products share one dequantisation.
template <class C>
void engine_finish(const word_t header[C::PORTS][EngineShapes<C>::HEADER_WORDS],
                   const int32_t acc[EngineShapes<C>::ROWS][C::PORTS][EngineShapes<C>::TILE],
                   const float row_scale[EngineShapes<C>::ROWS], int rows, int t, Product product,
                   float values[EngineShapes<C>::ROWS][EngineShapes<C>::INPUTS],
                   word_t results[EngineShapes<C>::ROWS][EngineShapes<C>::RESULT_WORDS]) {
    FASTCAR_NO_INLINE
    const int chunk = product.tile * C::PORTS;
    const int first = t * chunk;
    float lanes[FLOAT_LANES] = {0.0f, 0.0f, 0.0f, 0.0f};
    FASTCAR_PARTITION(lanes, 0)
    float previous = 0.0f;
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, EngineShapes<C>::ROWS)
        for (int i = 0; i < chunk; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(4, EngineShapes<C>::TILE * C::PORTS)
            const bool real = first + i < product.channels;
            const float value = real ? engine_channel<C>(header, acc[r], row_scale[r], product, i) : 0.0f;
            lanes[i % FLOAT_LANES] = value;
            if (!product.paired && i % FLOAT_LANES == FLOAT_LANES - 1) {
                results[r][i / FLOAT_LANES] = pack_float(lanes);
            }
            if (product.paired && real && i % 2 == 1) {
                values[r][(first + i) / 2] = gated_silu(previous, value);
            }
            previous = value;
        }
    }
}

// Words of y that one row gets from tile t of the last product.
template <class C>
int result_words(const Product& product, int t) {
    FASTCAR_INLINE
    const int whole = product.tile * C::PORTS / FLOAT_LANES;
    const int left = words_for(product.channels, FLOAT_LANES) - t * whole;
    return left < whole ? left : whole;
}

}  // namespace fastcar

#endif
