// The DATAFLOW processes of the MLP top: every stream has one producer and one consumer. An array of streams is indexed
// by constants only (unrolled loops): a stream is a wire, there is nothing to address.
#ifndef FASTCAR_MLP_PROCESSES_HPP
#define FASTCAR_MLP_PROCESSES_HPP

#include <hls_stream.h>

#include "fastcar_mapping.hpp"
#include "fastcar_mlp_core.hpp"

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

// One port's section of the weight stream, in one long burst; nothing is read when no row computes.
template <class C>
void read_weights(const word_t* weights, uint32_t index_register, uint32_t prefetch, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    const int words = count_rows(index_register, C::BATCH) > 0 ? Shapes<C>::PORT_WORDS : 0;
    const Span span = words_from_memory(words, C::PREFETCH_WORDS, prefetch);
    for (int i = span.first; i < span.end; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, Shapes<C>::PORT_WORDS)
        out.write(weights[i]);
    }
}

// The one weight stream, shared by all cores that have a row: `held` words of each port from the buffer, the rest from the
// ports, which read ahead meanwhile. Before that, `filled` words go from the ports into the buffer.
//
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

template <class C>
static void share_weights(hls::stream<word_t> in[C::PORTS], uint32_t index_register, uint32_t prefetch,
                          hls::stream<Beat<C::PORTS> > out[C::CORES]) {
    FASTCAR_NO_INLINE
    const int count = count_rows(computing_rows(index_register, prefetch), C::BATCH);
    const int filled = prefetch == PREFETCH_FILL ? C::PREFETCH_WORDS : 0;
    const int held = prefetch == PREFETCH_HELD ? C::PREFETCH_WORDS : 0;
    share_stream<C>(in, filled, held, count > 0 ? Shapes<C>::PORT_WORDS : 0, count, out);
}

// Rows that compute, each to its core; replayed rows are not read.
template <class C>
void read_rows(const word_t* x, uint32_t index_register, uint32_t prefetch, hls::stream<word_t> out[C::CORES]) {
    FASTCAR_NO_INLINE
    const uint32_t computing = computing_rows(index_register, prefetch);
    ap_uint<MappingBits<C::CORES>::VALUE> mapping[INDEX_REGISTER_BITS];
    map_rows<MappingBits<C::CORES>::VALUE>(computing, C::BATCH, C::CORES, mapping);
    for (int row = 0; row < C::BATCH; ++row) {
        if (row_computes(computing, row)) {
            const int core = mapping[row].to_int();
            for (int i = 0; i < Shapes<C>::ROW_WORDS; ++i) {
                FASTCAR_PIPELINE(1)
                const word_t word = x[row * Shapes<C>::ROW_WORDS + i];
                for (int c = 0; c < C::CORES; ++c) {
                    FASTCAR_UNROLL
                    if (c == core) {
                        out[c].write(word);
                    }
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

// Rows back in order: from their core, or bit for bit from the cache. Two loops: a read under a condition is no burst.
template <class C>
void write_rows(const word_t* cached, uint32_t index_register, uint32_t prefetch, hls::stream<word_t> in[C::CORES],
                word_t* y) {
    FASTCAR_NO_INLINE
    const int rows = prefetch == PREFETCH_FILL ? 0 : C::BATCH;
    ap_uint<MappingBits<C::CORES>::VALUE> mapping[INDEX_REGISTER_BITS];
    map_rows<MappingBits<C::CORES>::VALUE>(index_register, C::BATCH, C::CORES, mapping);
    for (int row = 0; row < rows; ++row) {
        FASTCAR_TRIPS(0, C::BATCH)
        const int first = row * Shapes<C>::ROW_WORDS;
        if (row_computes(index_register, row)) {
            const int core = mapping[row].to_int();
            for (int i = 0; i < Shapes<C>::ROW_WORDS; ++i) {
                FASTCAR_PIPELINE(1)
                y[first + i] = read_from_core<C>(in, core);
            }
        } else {
            for (int i = 0; i < Shapes<C>::ROW_WORDS; ++i) {
                FASTCAR_PIPELINE(1)
                y[first + i] = cached[first + i];
            }
        }
    }
}

template <class S>
void fetch_tile(hls::stream<Beat<S::PORTS> >& weights, word_t head[S::PORTS][S::HEAD_WORDS],
                word_t tile[S::PORTS][S::TILE_WORDS], Bounds bounds = S::bounds()) {
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

// Tiles are double-buffered: while one is multiplied, the next is fetched and the ones before are scaled and finished.
template <class C>
void gate_up_stage(hls::stream<Beat<C::PORTS> >& weights,
                   const int8_t q[Shapes<C>::ROWS][Shapes<C>::GateUp::CHANNEL_WORDS][Shapes<C>::GateUp::LANES],
                   const float row_scale[Shapes<C>::ROWS], int rows, float a[Shapes<C>::ROWS][C::INTERMEDIATE]) {
    FASTCAR_NO_INLINE
    typedef typename Shapes<C>::GateUp S;
    for (int t = 0; t < S::TILES; ++t) {
        FASTCAR_DATAFLOW
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
        fetch_tile<S>(weights, head, tile);
        mac_tile<S>(tile, q, rows, acc);
        scale_tile<S>(head, acc, row_scale, rows, value);
        finish_gate_up<C>(value, rows, t, a);
    }
}

template <class S>
void down_stage(hls::stream<Beat<S::PORTS> >& weights, const int8_t q[S::ROWS][S::CHANNEL_WORDS][S::LANES],
                const float row_scale[S::ROWS], int rows, float y[S::ROWS][S::N]) {
    FASTCAR_NO_INLINE
    for (int t = 0; t < S::TILES; ++t) {
        FASTCAR_DATAFLOW
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
        fetch_tile<S>(weights, head, tile);
        mac_tile<S>(tile, q, rows, acc);
        scale_tile<S>(head, acc, row_scale, rows, value);
        finish_down<S>(value, rows, t, y);
    }
}

template <class C>
void load_core_rows(hls::stream<word_t>& in, int rows, float x[Shapes<C>::ROWS][C::HIDDEN]) {
    FASTCAR_NO_INLINE
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, Shapes<C>::ROWS)
        for (int k = 0; k < Shapes<C>::ROW_WORDS; ++k) {
            FASTCAR_PIPELINE(1)
            const word_t word = in.read();
            for (int i = 0; i < FLOAT_LANES; ++i) {
                FASTCAR_UNROLL
                if (k * FLOAT_LANES + i < C::HIDDEN) {
                    x[r][k * FLOAT_LANES + i] = unpack_float(word, i);
                }
            }
        }
    }
}

template <class C>
void store_core_rows(const float y[Shapes<C>::ROWS][C::HIDDEN], int rows, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    for (int r = 0; r < rows; ++r) {
        FASTCAR_TRIPS(1, Shapes<C>::ROWS)
        for (int k = 0; k < Shapes<C>::ROW_WORDS; ++k) {
            FASTCAR_PIPELINE(1)
            float lanes[FLOAT_LANES];
            FASTCAR_PARTITION(lanes, 0)
            for (int i = 0; i < FLOAT_LANES; ++i) {
                FASTCAR_UNROLL
                lanes[i] = k * FLOAT_LANES + i < C::HIDDEN ? y[r][k * FLOAT_LANES + i] : 0.0f;
            }
            out.write(pack_float(lanes));
        }
    }
}

// One core: its rows (if any) through the first product, the activation and the second product.
template <class C, int CORE>
void core(uint32_t index_register, uint32_t prefetch, hls::stream<word_t>& in, hls::stream<Beat<C::PORTS> >& weights,
          hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    typedef typename Shapes<C>::GateUp GateUp;
    typedef typename Shapes<C>::Down Down;
    const int rows = rows_of_core(count_rows(computing_rows(index_register, prefetch), C::BATCH), CORE, C::CORES);
    float x[GateUp::ROWS][GateUp::K];
    int8_t x_int8[GateUp::ROWS][GateUp::CHANNEL_WORDS][GateUp::LANES];
    float x_scale[GateUp::ROWS];
    float a[Down::ROWS][Down::K];
    int8_t a_int8[Down::ROWS][Down::CHANNEL_WORDS][Down::LANES];
    float a_scale[Down::ROWS];
    float y[Down::ROWS][Down::N];
    FASTCAR_PARTITION_CYCLIC(x, 2, 4)
    FASTCAR_PARTITION_CYCLIC(a, 2, 4)
    FASTCAR_PARTITION_CYCLIC(y, 2, 4)
    FASTCAR_PARTITION(x_int8, 1)
    FASTCAR_RESHAPE(x_int8, 3)
    FASTCAR_PARTITION(a_int8, 1)
    FASTCAR_RESHAPE(a_int8, 3)
    if (rows > 0) {
        load_core_rows<C>(in, rows, x);
        quantize_rows<GateUp>(x, rows, x_int8, x_scale);
        gate_up_stage<C>(weights, x_int8, x_scale, rows, a);
        quantize_rows<Down>(a, rows, a_int8, a_scale);
        down_stage<Down>(weights, a_int8, a_scale, rows, y);
        store_core_rows<C>(y, rows, out);
    }
}

}  // namespace fastcar

#endif
