// The DATAFLOW processes of the engine's top; same rules as fastcar_mlp_processes.hpp. Every process derives the loop
// bounds of the call from the same scalars, so that all of them agree on how many words each stream carries.
#ifndef FASTCAR_ENGINE_PROCESSES_HPP
#define FASTCAR_ENGINE_PROCESSES_HPP

#include <hls_stream.h>

#include "fastcar_engine_core.hpp"
#include "fastcar_mlp_processes.hpp"

namespace fastcar {

// The prefetch buffer holds weights of an MLP: a linear leaves it alone.
inline uint32_t engine_prefetch(uint32_t op, uint32_t prefetch) {
    FASTCAR_INLINE
    return op == OP_MLP || prefetch == PREFETCH_FILL ? prefetch : 0u;
}

// One port's section of the weight stream; nothing is read when no row computes.
template <class C>
void engine_read_weights(const word_t* weights, uint32_t index_register, uint32_t prefetch, uint32_t op, int inputs,
                         int channels, int tile, int tiles, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    const int words = call_words(make_call<C>(op, inputs, channels, tile, tiles));
    const int count = count_rows(index_register, C::BATCH) > 0 ? words : 0;
    const Span span = words_from_memory(count, C::PREFETCH_WORDS, engine_prefetch(op, prefetch));
    for (int i = span.first; i < span.end; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, MOST_BEATS)
        out.write(weights[i]);
    }
}

// The one weight stream, shared by all cores that have a row.
template <class C>
static void engine_share_weights(hls::stream<word_t> in[C::PORTS], uint32_t index_register, uint32_t prefetch,
                                 uint32_t op, int inputs, int channels, int tile, int tiles,
                                 hls::stream<Beat<C::PORTS> > out[C::CORES]) {
    FASTCAR_NO_INLINE
    const uint32_t mode = engine_prefetch(op, prefetch);
    const int rows = count_rows(computing_rows(index_register, mode), C::BATCH);
    const int beats = rows > 0 ? call_words(make_call<C>(op, inputs, channels, tile, tiles)) : 0;
    const int filled = mode == PREFETCH_FILL ? C::PREFETCH_WORDS : 0;
    const int held = mode == PREFETCH_HELD ? C::PREFETCH_WORDS : 0;
    share_stream<C>(in, filled, held, beats, rows, out);
}

// Rows that compute, each to its core.
template <class C>
void engine_read_rows(const word_t* x, uint32_t index_register, uint32_t prefetch, uint32_t op, int inputs,
                      int channels, int tile, int tiles, hls::stream<word_t> out[C::CORES]) {
    FASTCAR_NO_INLINE
    const uint32_t computing = computing_rows(index_register, prefetch);
    const Call call = make_call<C>(op, inputs, channels, tile, tiles);
    const int words = call.products > 0 ? words_for(call_inputs(call), FLOAT_LANES) : 0;
    ap_uint<MappingBits<C::CORES>::VALUE> mapping[INDEX_REGISTER_BITS];
    map_rows<MappingBits<C::CORES>::VALUE>(computing, C::BATCH, C::CORES, mapping);
    for (int row = 0; row < C::BATCH; ++row) {
        const int core = mapping[row].to_int();
        const int count = row_computes(computing, row) ? words : 0;
        for (int i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, EngineShapes<C>::INPUTS)
            const word_t word = x[row * words + i];
            for (int c = 0; c < C::CORES; ++c) {
                FASTCAR_UNROLL
                if (c == core) {
                    out[c].write(word);
                }
            }
        }
    }
}

// Computed rows come tile by tile, row by row within a tile. A replayed row of an MLP is copied from the cache bit for
// bit; a row that a linear does not compute is not written.
template <class C>
void engine_write_rows(const word_t* cached, uint32_t index_register, uint32_t prefetch, uint32_t op, int inputs,
                       int channels, int tile, int tiles, hls::stream<word_t> in[C::CORES], word_t* y) {
    FASTCAR_NO_INLINE
    const bool fills = prefetch == PREFETCH_FILL;
    const Call call = make_call<C>(op, inputs, channels, tile, tiles);
    const int words = words_for(call.last.channels, FLOAT_LANES);
    const int steps = call.products > 0 && !fills ? call.last.tiles : 0;
    ap_uint<MappingBits<C::CORES>::VALUE> mapping[INDEX_REGISTER_BITS];
    map_rows<MappingBits<C::CORES>::VALUE>(index_register, C::BATCH, C::CORES, mapping);
    for (int row = 0; row < C::BATCH; ++row) {
        const int count = op == OP_MLP && !fills && !row_computes(index_register, row) ? words : 0;
        for (int i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, EngineShapes<C>::INPUTS)
            y[row * words + i] = cached[row * words + i];
        }
    }
    for (int t = 0; t < steps; ++t) {
        FASTCAR_TRIPS(0, MOST_CHANNELS)
        for (int row = 0; row < C::BATCH; ++row) {
            const int first = row * words + t * (call.last.bounds.tile * C::PORTS / FLOAT_LANES);
            const int count = row_computes(index_register, row) ? result_words<C>(call.last, t) : 0;
            const int core = mapping[row].to_int();
            for (int i = 0; i < count; ++i) {
                FASTCAR_PIPELINE(1)
                FASTCAR_TRIPS(0, EngineShapes<C>::RESULT_WORDS)
                y[first + i] = read_from_core<C>(in, core);
            }
        }
    }
}

// Results of tile t leave for memory; activations stay in the core.
template <class C>
void engine_send(const word_t results[EngineShapes<C>::ROWS][EngineShapes<C>::RESULT_WORDS], int rows, int t,
                 Product product, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    const int count = product.inner ? 0 : result_words<C>(product, t);
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, EngineShapes<C>::ROWS)
        for (int i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, EngineShapes<C>::RESULT_WORDS)
            out.write(results[r][i]);
        }
    }
}

// Tiles are double-buffered: while one is multiplied, the next is fetched, and the ones before are scaled, finished and
// sent. The head skips the multiplication, so it has three copies.
template <class C>
void engine_product(hls::stream<Beat<C::PORTS> >& weights,
                    const int8_t q[EngineShapes<C>::ROWS][EngineShapes<C>::CHANNEL_WORDS][EngineShapes<C>::LANES],
                    const float row_scale[EngineShapes<C>::ROWS], int rows, Product product,
                    float values[EngineShapes<C>::ROWS][EngineShapes<C>::INPUTS], hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    typedef EngineShapes<C> S;
    for (int t = 0; t < product.tiles; ++t) {
        FASTCAR_DATAFLOW
        FASTCAR_TRIPS(1, MOST_CHANNELS)
        word_t head[S::PORTS][S::HEAD_WORDS];
        FASTCAR_PARTITION(head, 1)
        FASTCAR_BLOCKS(head, 3)
        word_t tile[S::PORTS][S::TILE_WORDS];
        FASTCAR_PARTITION(tile, 1)
        FASTCAR_TILE_MEMORY(tile)
        int32_t acc[S::ROWS][S::PORTS][S::TILE_SUMS];
        FASTCAR_PARTITION(acc, 1)
        FASTCAR_PARTITION(acc, 2)
        float value[S::ROWS][S::PORTS][S::TILE];
        FASTCAR_PARTITION(value, 1)
        FASTCAR_PARTITION(value, 2)
        word_t results[S::ROWS][S::RESULT_WORDS];
        fetch_tile<S>(weights, head, tile, product.bounds);
        mac_tile<S>(tile, q, rows, acc, product.bounds);
        scale_tile<S>(head, acc, row_scale, rows, value, product.bounds);
        engine_finish<C>(value, rows, t, product, values, results);
        engine_send<C>(results, rows, t, product, out);
    }
}

template <class C>
void engine_load_rows(hls::stream<word_t>& in, int rows, int inputs,
                      float values[EngineShapes<C>::ROWS][EngineShapes<C>::INPUTS]) {
    FASTCAR_NO_INLINE
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, EngineShapes<C>::ROWS)
        for (int k = 0; k < inputs; k += FLOAT_LANES) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(1, EngineShapes<C>::INPUTS / FLOAT_LANES + 1)
            const word_t word = in.read();
            for (int i = 0; i < FLOAT_LANES; ++i) {
                FASTCAR_UNROLL
                if (k + i < inputs) {
                    values[r][k + i] = unpack_float(word, i);
                }
            }
        }
    }
}

// One core: its rows (if any) through the products of the call. One call site, so one MAC array: an MLP's second product
// takes the activations that the first left in `values`.
template <class C, int CORE>
void engine_core(uint32_t index_register, uint32_t prefetch, uint32_t op, int inputs, int channels, int tile, int tiles,
                 hls::stream<word_t>& in, hls::stream<Beat<C::PORTS> >& weights, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    typedef EngineShapes<C> S;
    const Call call = make_call<C>(op, inputs, channels, tile, tiles);
    const int rows = rows_of_core(count_rows(computing_rows(index_register, prefetch), C::BATCH), CORE, C::CORES);
    const int products = rows > 0 ? call.products : 0;
    float values[S::ROWS][S::INPUTS];
    FASTCAR_PARTITION_CYCLIC(values, 2, 4)
    int8_t q[S::ROWS][S::CHANNEL_WORDS][S::LANES];
    float row_scale[S::ROWS];
    FASTCAR_PARTITION(q, 1)
    FASTCAR_RESHAPE(q, 3)
    if (products > 0) {
        engine_load_rows<C>(in, rows, call_inputs(call), values);
    }
    for (int number = 0; number < products; ++number) {
        FASTCAR_TRIPS(0, 2)
        const Product product = number + 1 < products ? call.first : call.last;
        engine_quantize<C>(values, rows, product, q, row_scale);
        engine_product<C>(weights, q, row_scale, rows, product, values, out);
    }
}

}  // namespace fastcar

#endif
