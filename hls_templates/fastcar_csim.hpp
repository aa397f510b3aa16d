// The exact sums of a call, from the kernel's own functions. For C simulation only; not synthesised.
#ifndef FASTCAR_CSIM_HPP
#define FASTCAR_CSIM_HPP

#include <stdint.h>
#include <string.h>

#include "fastcar_engine_core.hpp"

namespace fastcar {
namespace csim {

// Word i of a port's section: AXI_WORDS ports share a section of the stream, word by word.
template <class C>
const word_t& stream_word(const word_t* weights, int section, int port, int i) {
    return weights[(port / C::AXI_WORDS * section + i) * C::AXI_WORDS + port % C::AXI_WORDS];
}

// One row through one product, whose weights begin at word `first` of every section of `section` words. Activations stay in
// `values`. Writes sums [channels][sums] to `out` and returns what follows them.
//
// t: tiles; p and i: words of the tile on every port; c: channels of the tile. Internal linkage, so that the static
// arrays belong to this library alone, whatever else a process loads.
template <class C>
static int32_t* run_product(const Product& product, const word_t* weights, int section, int first,
                            float values[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS], int32_t* out) {
    typedef Shapes<C> S;
    static int8_t q[S::CORES][S::PASSES * S::CHANNEL_WORDS][S::LANES];
    static word_t head[S::PORTS][S::HEAD_WORDS];
    static word_t tile[S::PORTS][S::TILE_WORDS];
    static int32_t sums[S::CORES][S::PORTS][S::SUMS];
    static float value[S::CORES][S::PORT_LANES][S::VALUES];
    static word_t results[S::CORES][S::PASSES * S::RESULT_WORDS];
    float row_scale[S::CORES][S::PASSES] = {};
    const int tile_words = product.tile * product.channel_words, tile_sums = product.tile * product.sums;
    const int rows = product.sums == 1 || product.tile > S::SCALE_ROWS ? product.tile : S::SCALE_ROWS;
    const int chunk = product.tile * S::PORTS;
    const int sum_words = product.sums == 1 ? product.channel_words : 128 / S::LANES;
    quantize_rows<C>(values, 1, product.inputs, product.channel_words, q, row_scale);
    for (int t = 0; t < product.tiles; ++t) {
        const int from = first + t * (product.head_words + tile_words);
        for (int p = 0; p < S::PORTS; ++p) {
            for (int i = 0; i < product.head_words; ++i) head[p][i] = stream_word<C>(weights, section, p, from + i);
            for (int i = 0; i < tile_words; ++i) {
                tile[p][i] = stream_word<C>(weights, section, p, from + product.head_words + i);
            }
        }
        mac_tile<S>(tile, q, 1, tile_words, tile_words, sum_words, product.channel_words, sums);
        scale_tile<S>(head, sums, row_scale, 1, product.sums * rows * S::PORT_BLOCKS, product.tile, rows, product.sums,
                      tile_sums, product.scale_words, product.bias, value);
        finish_tile<C>(value, 1, chunk, t, chunk, product.channels, product.inner, product.activated, values, results);
        for (int c = 0; c < chunk && c < product.channels - t * chunk; ++c) {
            memcpy(out, &sums[0][c % S::PORTS][c / S::PORTS * product.sums], sizeof(int32_t) * product.sums);
            out += product.sums;
        }
    }
    return out;
}

// The sums of one row of x, product by product. Returns 0 when the engine refuses the request.
template <class C>
static int sums_of_row(const float* x, const word_t* weights, uint32_t op, int inputs, int channels, int tile, int tiles,
                       int32_t* out) {
    static float values[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS];
    const Call call = decode<C>(1, op, inputs, channels, tile, tiles);
    const int section = (call.words + 255) / 256 * 256;  // a section starts at a multiple of 4 KiB
    if (call.products == 0) {
        return 0;
    }
    const Product first = first_product<C>();
    const int count = call.products > 1 ? first.inputs : call.last.inputs;
    memcpy(values[0][0], x, sizeof(float) * count);
    if (call.products > 1) {
        out = run_product<C>(first, weights, section, 0, values, out);
    }
    run_product<C>(call.last, weights, section, call.products > 1 ? product_words(first) : 0, values, out);
    return 1;
}

}  // namespace csim
}  // namespace fastcar

#endif
