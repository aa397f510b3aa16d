// What a call of the engine computes: an MLP (two products) or a linear (one), all on one MAC array. Plain functions over
// words and arrays, no streams. Loops run to the bounds of the product at hand; buffers have the sizes of the largest.
//
// In the first product of a gated MLP channel 2n is gate n and 2n + 1 is up n. tile * PORTS is a multiple of four, so that
// the channels of a tile are whole words of y, and gate n and up n share a tile.
#ifndef FASTCAR_ENGINE_CORE_HPP
#define FASTCAR_ENGINE_CORE_HPP

#include "fastcar_activation.hpp"
#include "fastcar_tile.hpp"

namespace fastcar {

static const uint32_t OP_MLP = 0;
static const uint32_t OP_LINEAR = 1;
static const uint32_t OP_LINEAR_BIAS = 2;
static const int MOST_CHANNELS = 1 << 18;

// One matrix product: the bounds of its loops. `inner`: its values are activated and stay in the core.
struct Product {
    int inputs;
    int channels;
    int tiles;
    bool inner;
    Bounds bounds;
};

// What one call computes: products == 0 means that the request was refused, and nothing is read or written.
struct Call {
    int products;
    Product first;
    Product last;
};

// Sizes of the buffers: the largest bounds of configuration C.
template <class C>
struct Shapes {
    typedef typename WeightFormat<C::WEIGHT_BITS>::Type Format;
    static const int ROWS = (C::BATCH + C::CORES - 1) / C::CORES;
    static const int PORTS = C::PORTS;
    static const int LANES = Format::LANES;
    static const int INPUTS = C::MAX_INPUTS;
    static const int TILE = C::MAX_TILE;
    static const int TILE_WORDS = C::MAX_TILE_WORDS;
    static const int TILE_SUMS = C::MAX_TILE_SUMS;
    static const int HEAD_WORDS = C::MAX_HEAD_WORDS;
    static const int CHANNEL_WORDS = C::MAX_CHANNEL_WORDS;
    static const int RESULT_WORDS = WordsFor<C::MAX_TILE * C::PORTS, FLOAT_LANES>::VALUE;
    static const int ROW_LANES = (ROWS + 3) / 4;
    static const int ROW_BLOCKS = (ROWS + ROW_LANES - 1) / ROW_LANES;
    static_assert(C::BATCH >= 1 && C::BATCH <= 32, "the Index Register has 32 bits");
    static_assert(C::MAX_INPUTS <= 1 << 16, "an int32 sum holds 65536 products of int8");
};

inline int words_for(int count, int lanes) {
    FASTCAR_INLINE
    return (count + lanes - 1) / lanes;
}

template <class Format>
Product make_product(int inputs, int channels, int tile, int tiles, bool inner, bool bias) {
    FASTCAR_INLINE
    const bool groups = Format::GROUP == 128;
    Product product;
    product.inputs = inputs;
    product.channels = channels;
    product.tiles = tiles;
    product.inner = inner;
    product.bounds.tile = tile;
    product.bounds.sums = groups ? words_for(inputs, Format::GROUP) : 1;
    product.bounds.sum_words = groups ? 128 / Format::LANES : words_for(inputs, Format::LANES);
    product.bounds.channel_words = product.bounds.sums * product.bounds.sum_words;
    product.bounds.scale_words = words_for(tile * product.bounds.sums, Format::SCALE_LANES);
    product.bounds.head_words = product.bounds.scale_words + (bias ? words_for(tile, FLOAT_LANES) : 0);
    product.bounds.tile_words = tile * product.bounds.channel_words;
    product.bounds.bias = bias;
    return product;
}

// Whether the buffers hold a linear and its tiles cover its channels. Nothing is multiplied before it is known to be small.
template <class C>
bool linear_fits(int inputs, int channels, int tile, int tiles, bool bias) {
    FASTCAR_INLINE
    typedef Shapes<C> S;
    const bool small = inputs >= 1 && inputs <= S::INPUTS && tile >= 1 && tile <= S::TILE && channels >= 1 &&
                       channels <= MOST_CHANNELS && tiles >= 1 && tiles <= channels;
    const Product product = make_product<typename S::Format>(small ? inputs : 1, 1, small ? tile : 1, 1, false, bias);
    const int chunk = small ? tile * C::PORTS : 0;
    const int covered = small ? tiles * chunk : 0;
    return small && product.bounds.tile_words <= S::TILE_WORDS && product.bounds.head_words <= S::HEAD_WORDS &&
           tile * product.bounds.sums <= S::TILE_SUMS && chunk % FLOAT_LANES == 0 && covered >= channels &&
           covered - chunk < channels;
}

template <class C>
Call make_call(uint32_t op, int inputs, int channels, int tile, int tiles) {
    FASTCAR_INLINE
    typedef typename Shapes<C>::Format Format;
    const int parts = C::GATED ? 2 : 1;
    const bool bias = op == OP_LINEAR_BIAS;
    Call call;
    call.first = make_product<Format>(C::HIDDEN, parts * C::INTERMEDIATE, C::GATE_UP_TILE, C::GATE_UP_TILES, true,
                                      C::UP_BIAS);
    if (op == OP_MLP) {
        call.products = 2;
        call.last = make_product<Format>(C::INTERMEDIATE, C::HIDDEN, C::DOWN_TILE, C::DOWN_TILES, false, C::DOWN_BIAS);
    } else {
        const bool fits = op <= OP_LINEAR_BIAS && linear_fits<C>(inputs, channels, tile, tiles, bias);
        call.products = fits ? 1 : 0;
        call.last = make_product<Format>(fits ? inputs : 0, fits ? channels : 0, fits ? tile : 0, fits ? tiles : 0,
                                         false, bias);
    }
    return call;
}

inline int product_words(const Product& product) {
    FASTCAR_INLINE
    return product.tiles * (product.bounds.head_words + product.bounds.tile_words);
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

template <class C>
void quantize_rows(const float values[Shapes<C>::ROWS][Shapes<C>::INPUTS], int rows, Product product,
                   int8_t q[Shapes<C>::ROWS][Shapes<C>::CHANNEL_WORDS][Shapes<C>::LANES],
                   float row_scale[Shapes<C>::ROWS]) {
    FASTCAR_NO_INLINE
    typedef Shapes<C> S;
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, S::ROWS)
        row_scale[r] = quantize_row<S::INPUTS, S::CHANNEL_WORDS, S::LANES>(values[r], q[r], product.inputs,
                                                                           product.bounds.channel_words);
    }
}

// Values of tile t -> activated neurons in `values` (the inner product of an MLP), or whole words of y in `results`.
// r: rows; i: channels of the tile, pipelined, one per clock, as scale_tile delivers them. Four channels make a word of y;
// `previous` is the gate of an up channel.
template <class C>
void finish_tile(const float value[Shapes<C>::ROWS][C::PORTS][Shapes<C>::TILE], int rows, int t, Product product,
                 float values[Shapes<C>::ROWS][Shapes<C>::INPUTS],
                 word_t results[Shapes<C>::ROWS][Shapes<C>::RESULT_WORDS]) {
    FASTCAR_NO_INLINE
    const int parts = C::GATED ? 2 : 1;
    const int chunk = product.bounds.tile * C::PORTS;
    const int first = t * chunk;
    float lanes[FLOAT_LANES] = {0.0f, 0.0f, 0.0f, 0.0f};
    FASTCAR_PARTITION(lanes, 0)
    float previous = 0.0f;
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, Shapes<C>::ROWS)
        for (int i = 0; i < chunk; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(4, Shapes<C>::TILE * C::PORTS)
            const bool real = first + i < product.channels;
            const float now = real ? channel_value<Shapes<C> >(value[r], i) : 0.0f;
            lanes[i % FLOAT_LANES] = now;
            if (!product.inner && i % FLOAT_LANES == FLOAT_LANES - 1) {
                results[r][i / FLOAT_LANES] = pack_float(lanes);
            }
            if (product.inner && real && i % parts == parts - 1) {
                const float act = Activate<C::ACTIVATION>::of(C::GATED ? previous : now);
                values[r][(first + i) / parts] = C::GATED ? act * now : act;
            }
            previous = now;
        }
    }
}

// Words of y that one row gets from tile t of the last product.
template <class C>
int result_words(const Product& product, int t) {
    FASTCAR_INLINE
    const int whole = product.bounds.tile * C::PORTS / FLOAT_LANES;
    const int left = words_for(product.channels, FLOAT_LANES) - t * whole;
    return left < whole ? left : whole;
}

}  // namespace fastcar

#endif
