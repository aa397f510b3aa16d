// The DATAFLOW processes of the engine's top: every stream has one producer and one consumer. An array of streams is
// indexed by constants only (unrolled loops): a stream is a wire, there is nothing to address. Every process derives the
// loop bounds of the call from the same scalars, so that all of them agree on how many words each stream carries.
#ifndef FASTCAR_ENGINE_PROCESSES_HPP
#define FASTCAR_ENGINE_PROCESSES_HPP

#include <hls_stream.h>

#include "fastcar_engine_core.hpp"
#include "fastcar_mapping.hpp"

namespace fastcar {

static const int MOST_BEATS = 1 << 30;

// One word of every weight port.
template <int PORTS>
struct Beat {
    word_t port[PORTS];
};

// Values of the argument `prefetch`; any other reads all weights from memory.
static const uint32_t PREFETCH_HELD = 1;  // the buffer holds the first PREFETCH_WORDS words of every section
static const uint32_t PREFETCH_FILL = 2;  // nothing is computed: the buffer is filled from the weights given

// Rows that a call computes: none when it only fills the buffer, whatever the register says.
inline uint32_t computing_rows(uint32_t index_register, uint32_t prefetch) {
    FASTCAR_INLINE
    return prefetch == PREFETCH_FILL ? 0u : index_register;
}

// Words first .. end - 1 of a section.
struct Span {
    int first;
    int end;
};

// What a port reads of a section of which a call needs `words`; `held`: words of the buffer.
inline Span words_from_memory(int words, int held, uint32_t prefetch) {
    FASTCAR_INLINE
    Span span;
    span.first = prefetch == PREFETCH_HELD ? held : 0;
    span.end = prefetch == PREFETCH_FILL ? held : words;
    return span;
}

// The prefetch buffer holds weights of an MLP: a linear leaves it alone.
inline uint32_t prefetch_of(uint32_t op, uint32_t prefetch) {
    FASTCAR_INLINE
    return op == OP_MLP || prefetch == PREFETCH_FILL ? prefetch : 0u;
}

// One port's section of the weight stream; nothing is read when no row computes.
template <class C>
void read_weights(const word_t* weights, uint32_t index_register, uint32_t prefetch, uint32_t op, int inputs,
                  int channels, int tile, int tiles, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    const int words = call_words(make_call<C>(op, inputs, channels, tile, tiles));
    const int count = count_rows(index_register, C::BATCH) > 0 ? words : 0;
    const Span span = words_from_memory(count, C::PREFETCH_WORDS, prefetch_of(op, prefetch));
    for (int i = span.first; i < span.end; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, MOST_BEATS)
        out.write(weights[i]);
    }
}

// The one weight stream, shared by all cores that have a row: `held` words of each port from the buffer, the rest from the
// ports, which read ahead meanwhile. Before that, `filled` words go from the ports into the buffer.
//
// First loop: words that fill the buffer; second: beats that go to the cores; both pipelined, ports unrolled.
// The buffer keeps its words from call to call. The function has internal linkage, so that the buffer belongs to this
// kernel alone, whatever else a process loads.
template <class C>
static void share_stream(hls::stream<word_t> in[C::PORTS], int filled, int held, int beats, int cores,
                         hls::stream<Beat<C::PORTS> > out[C::CORES]) {
    FASTCAR_INLINE
    static word_t buffer[C::PORTS][C::PREFETCH_WORDS > 0 ? C::PREFETCH_WORDS : 1];
    FASTCAR_PARTITION(buffer, 1)
    FASTCAR_TILE_MEMORY(buffer)
    for (int i = 0; i < filled; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, C::PREFETCH_WORDS)
        for (int p = 0; p < C::PORTS; ++p) {
            FASTCAR_UNROLL
            buffer[p][i] = in[p].read();
        }
    }
    for (int i = 0; i < beats; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, MOST_BEATS)
        Beat<C::PORTS> beat;
        for (int p = 0; p < C::PORTS; ++p) {
            FASTCAR_UNROLL
            beat.port[p] = i < held ? buffer[p][i] : in[p].read();
        }
        for (int c = 0; c < C::CORES; ++c) {
            FASTCAR_UNROLL
            if (c < cores) {
                out[c].write(beat);
            }
        }
    }
}

// The weight stream of a call.
template <class C>
static void share_weights(hls::stream<word_t> in[C::PORTS], uint32_t index_register, uint32_t prefetch, uint32_t op,
                          int inputs, int channels, int tile, int tiles, hls::stream<Beat<C::PORTS> > out[C::CORES]) {
    FASTCAR_NO_INLINE
    const uint32_t mode = prefetch_of(op, prefetch);
    const int rows = count_rows(computing_rows(index_register, mode), C::BATCH);
    const int beats = rows > 0 ? call_words(make_call<C>(op, inputs, channels, tile, tiles)) : 0;
    const int filled = mode == PREFETCH_FILL ? C::PREFETCH_WORDS : 0;
    const int held = mode == PREFETCH_HELD ? C::PREFETCH_WORDS : 0;
    share_stream<C>(in, filled, held, beats, rows, out);
}

// Rows that compute, each to its core. row: rows of the batch; i: words of a row, pipelined; cores unrolled.
template <class C>
void read_rows(const word_t* x, uint32_t index_register, uint32_t prefetch, uint32_t op, int inputs, int channels,
               int tile, int tiles, hls::stream<word_t> out[C::CORES]) {
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
            FASTCAR_TRIPS(0, Shapes<C>::INPUTS)
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

template <class C>
word_t read_from_core(hls::stream<word_t> in[C::CORES], int core) {
    FASTCAR_INLINE
    word_t word = 0;
    for (int c = 0; c < C::CORES; ++c) {
        FASTCAR_UNROLL
        if (c == core) {
            word = in[c].read();
        }
    }
    return word;
}

// A replayed row of an MLP is copied from the cache bit for bit; a row that a linear does not compute is not written.
// First nest: rows, words of a replayed row. Second: t tiles, rows, words of a row's tile, as the cores send them. Both
// pipeline the words.
template <class C>
void write_rows(const word_t* cached, uint32_t index_register, uint32_t prefetch, uint32_t op, int inputs, int channels,
                int tile, int tiles, hls::stream<word_t> in[C::CORES], word_t* y) {
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
            FASTCAR_TRIPS(0, Shapes<C>::INPUTS)
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
                FASTCAR_TRIPS(0, Shapes<C>::RESULT_WORDS)
                y[first + i] = read_from_core<C>(in, core);
            }
        }
    }
}

// i: words of head and weights, pipelined, one of every port per clock.
template <class S>
void fetch_tile(hls::stream<Beat<S::PORTS> >& weights, word_t head[S::PORTS][S::HEAD_WORDS],
                word_t tile[S::PORTS][S::TILE_WORDS], Bounds bounds) {
    FASTCAR_NO_INLINE
    for (int i = 0; i < bounds.head_words + bounds.tile_words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, S::HEAD_WORDS + S::TILE_WORDS)
        const Beat<S::PORTS> beat = weights.read();
        for (int p = 0; p < S::PORTS; ++p) {
            FASTCAR_UNROLL
            if (i < bounds.head_words) {
                head[p][i] = beat.port[p];
            } else {
                tile[p][i - bounds.head_words] = beat.port[p];
            }
        }
    }
}

// Results of tile t leave for memory, a word per clock; activations stay in the core.
template <class C>
void send_tile(const word_t results[Shapes<C>::ROWS][Shapes<C>::RESULT_WORDS], int rows, int t, Product product,
               hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    const int count = product.inner ? 0 : result_words<C>(product, t);
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, Shapes<C>::ROWS)
        for (int i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, Shapes<C>::RESULT_WORDS)
            out.write(results[r][i]);
        }
    }
}

// t: tiles of the product, a DATAFLOW region each. Tiles are double-buffered: while one is multiplied, the next is fetched,
// and the ones before are scaled, finished and sent. The head skips the multiplication, so it has three copies.
template <class C>
void run_product(hls::stream<Beat<C::PORTS> >& weights,
                 const int8_t q[Shapes<C>::ROWS][Shapes<C>::CHANNEL_WORDS][Shapes<C>::LANES],
                 const float row_scale[Shapes<C>::ROWS], int rows, Product product,
                 float values[Shapes<C>::ROWS][Shapes<C>::INPUTS], hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    typedef Shapes<C> S;
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
        finish_tile<C>(value, rows, t, product, values, results);
        send_tile<C>(results, rows, t, product, out);
    }
}

// r: rows of the core; k: words of a row, pipelined; four floats of a word unrolled.
template <class C>
void load_rows(hls::stream<word_t>& in, int rows, int inputs, float values[Shapes<C>::ROWS][Shapes<C>::INPUTS]) {
    FASTCAR_NO_INLINE
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, Shapes<C>::ROWS)
        for (int k = 0; k < inputs; k += FLOAT_LANES) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(1, Shapes<C>::INPUTS / FLOAT_LANES + 1)
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
void core(uint32_t index_register, uint32_t prefetch, uint32_t op, int inputs, int channels, int tile, int tiles,
          hls::stream<word_t>& in, hls::stream<Beat<C::PORTS> >& weights, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    typedef Shapes<C> S;
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
        load_rows<C>(in, rows, call_inputs(call), values);
    }
    for (int number = 0; number < products; ++number) {
        FASTCAR_TRIPS(0, 2)
        const Product product = number + 1 < products ? call.first : call.last;
        quantize_rows<C>(values, rows, product, q, row_scale);
        run_product<C>(weights, q, row_scale, rows, product, values, out);
    }
}

}  // namespace fastcar

#endif
