// The exact sums of a call, from the kernel's own functions. For C simulation only; not synthesised.
#ifndef FASTCAR_CSIM_HPP
#define FASTCAR_CSIM_HPP

#include <stdint.h>
#include <string.h>

#include "fastcar_engine_core.hpp"

namespace fastcar {
namespace csim {

// One row through one product, whose weights begin at word `first` of every section of `section` words. Activations stay
// in `values`. Writes [channels][sums] and returns what follows it.
//
// t: tiles; p and i: words of the tile on every port; c: channels of the tile. Internal linkage, so that the static
// arrays belong to this library alone, whatever else a process loads.
template <class C>
static int32_t* run_product(const Product& product, const word_t* weights, int section, int first,
                            float values[Shapes<C>::ROWS][Shapes<C>::INPUTS], int32_t* out) {
    typedef Shapes<C> S;
    static int8_t q[S::ROWS][S::CHANNEL_WORDS][S::LANES];
    static word_t head[S::PORTS][S::HEAD_WORDS];
    static word_t tile[S::PORTS][S::TILE_WORDS];
    static int32_t sums[S::ROWS][S::PORTS][S::TILE_SUMS];
    static float value[S::ROWS][S::PORTS][S::TILE];
    static word_t results[S::ROWS][S::RESULT_WORDS];
    const Bounds& bounds = product.bounds;
    float row_scale[S::ROWS] = {};
    quantize_rows<C>(values, 1, product, q, row_scale);
    for (int t = 0; t < product.tiles; ++t) {
        for (int p = 0; p < S::PORTS; ++p) {
            const word_t* at = weights + p * section + first + t * (bounds.head_words + bounds.tile_words);
            for (int i = 0; i < bounds.head_words; ++i) head[p][i] = at[i];
            for (int i = 0; i < bounds.tile_words; ++i) tile[p][i] = at[bounds.head_words + i];
        }
        mac_tile<S>(tile, q, 1, sums, bounds);
        scale_tile<S>(head, sums, row_scale, 1, value, bounds);
        finish_tile<C>(value, 1, t, product, values, results);
        const int chunk = bounds.tile * S::PORTS, left = product.channels - t * chunk;
        for (int c = 0; c < chunk && c < left; ++c) {
            memcpy(out, &sums[0][c % S::PORTS][c / S::PORTS * bounds.sums], sizeof(int32_t) * bounds.sums);
            out += bounds.sums;
        }
    }
    return out;
}

// The sums of one row of x, product by product. Returns 0 when the engine refuses the request.
template <class C>
static int sums_of_row(const float* x, const word_t* weights, uint32_t op, int inputs, int channels, int tile, int tiles,
                       int32_t* out) {
    static float values[Shapes<C>::ROWS][Shapes<C>::INPUTS];
    const Call call = make_call<C>(op, inputs, channels, tile, tiles);
    const int section = (call_words(call) + 255) / 256 * 256;  // a section starts at a multiple of 4 KiB
    if (call.products == 0) {
        return 0;
    }
    memcpy(values[0], x, sizeof(float) * call_inputs(call));
    if (call.products > 1) {
        out = run_product<C>(call.first, weights, section, 0, values, out);
    }
    run_product<C>(call.last, weights, section, call.products > 1 ? product_words(call.first) : 0, values, out);
    return 1;
}

}  // namespace csim
}  // namespace fastcar

#endif
