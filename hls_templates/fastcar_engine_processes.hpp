// The DATAFLOW processes of the engine: every stream has one producer and one consumer. An array of streams is indexed by
// constants only (unrolled loops): a stream is a wire, there is nothing to address. The top decodes a call once; what a
// process needs of it comes as plain scalars, so that all of them agree on how many words each stream carries.
#pragma once

#include <hls_stream.h>

#include "fastcar_engine_core.hpp"

namespace fastcar {

static const int MOST_BEATS = 1 << 30;

// The rows that compute, in row order. rows: of the batch; words: of a row.
template <class C>
void read_rows(const word_t* x, uint32_t computing, int row_words, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
rows:
    for (int row = 0; row < C::BATCH; ++row) {
        const int count = row_computes(computing, row) ? row_words : 0;
    words:
        for (int i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, Shapes<C>::INPUTS)
            out.write(x[row * row_words + i]);
        }
    }
}

// One AXI port's section of the weight stream; nothing is read when no row computes. A beat is a word of AXI_WORDS ports.
template <class C>
void read_weights(const typename Beat<C::AXI_WORDS>::Type* weights, int first_word, int end_word,
                  hls::stream<typename Beat<C::AXI_WORDS>::Type>& out) {
    FASTCAR_NO_INLINE
beats:
    for (int i = first_word; i < end_word; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, MOST_BEATS)
        FASTCAR_COUNT(COUNT_WEIGHT_BEATS)
        out.write(weights[i]);
    }
}

// The one weight stream: a word of every logical port per clock, from the beats of the AXI ports.
template <class C>
void share_weights(hls::stream<typename Beat<C::AXI_WORDS>::Type> in[C::PORTS / C::AXI_WORDS], int words,
                   hls::stream<word_t> out[C::PORTS]) {
    FASTCAR_NO_INLINE
words:
    for (int i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, MOST_BEATS)
        for (int port = 0; port < C::PORTS / C::AXI_WORDS; ++port) {
            const typename Beat<C::AXI_WORDS>::Type beat = in[port].read();
            for (int word = 0; word < C::AXI_WORDS; ++word) {
                out[port * C::AXI_WORDS + word].write(word_of_beat<C::AXI_WORDS>(beat, word));
            }
        }
    }
}

// A row that does not compute is not written. tiles: t tiles, rows, words of a row's tile, as the array sends them.
template <class C>
void write_rows(uint32_t computing, int tiles, int whole, int result_words, hls::stream<word_t>& in, word_t* y) {
    FASTCAR_NO_INLINE
tiles:
    for (int t = 0; t < tiles; ++t) {
        FASTCAR_TRIPS(0, MOST_CHANNELS)
        const int words = tile_results(t, whole, result_words);
    rows:
        for (int row = 0; row < C::BATCH; ++row) {
            const int first = row * result_words + t * whole;
            const int count = row_computes(computing, row) ? words : 0;
        words:
            for (int i = 0; i < count; ++i) {
                FASTCAR_PIPELINE(1)
                FASTCAR_TRIPS(0, Shapes<C>::RESULT_WORDS)
                y[first + i] = in.read();
            }
        }
    }
}

static const int CALL_WORDS = 5;

// A call as the engine in RTL takes it (fastcar_product.sv), 32 bits for each scalar; the rows that compute follow. first: the word of every section at
// which its weights begin.
template <class C>
void send_call(const Call& call, int passes, int first, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    const Product& p = call.last;
    int rows = 0;
count_rows:
    for (int row = 0; row < C::BATCH; ++row) {
        FASTCAR_PIPELINE(1)
        rows += row_computes(call.computing, row) ? 1 : 0;
    }
    const int scalars[4 * CALL_WORDS] = {
        call.products, rows, passes, call.result_words, first, call.words, p.inputs, p.channels, p.tiles, p.tile, p.sums,
        p.channel_words, p.scale_words, p.head_words, p.tile * p.channel_words, p.tile * p.sums,
        sum_words_of<C>(p), scale_rows_of<C>(p), p.tile * C::PORTS, p.bias};
    FASTCAR_PARTITION(scalars, 0)
send_words:
    for (int i = 0; i < CALL_WORDS; ++i) {
        FASTCAR_PIPELINE(1)
        const int at = i * FLOAT_LANES;
        out.write(word_of_bits(scalars[at], scalars[at + 1], scalars[at + 2], scalars[at + 3]));
    }
}

// words: of head and weights, one of every port per clock.
template <class S>
void fetch_tile(hls::stream<word_t> in[S::PORTS], int head_words, int words, word_t head[S::PORTS][S::HEAD_WORDS],
                word_t tile[S::PORTS][S::TILE_WORDS]) {
    FASTCAR_NO_INLINE
words:
    for (int i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, S::HEAD_WORDS + S::TILE_WORDS)
        for (int p = 0; p < S::PORTS; ++p) {
            const word_t word = in[p].read();
            if (i < head_words) {
                head[p][i] = word;
            } else {
                tile[p][i - head_words] = word;
            }
        }
    }
}

// Results of tile t leave for memory, in row order, a word per clock; activations stay in the cores.
template <class C>
void send_tile(const word_t results[C::CORES][Shapes<C>::PASSES * Shapes<C>::RESULT_WORDS], uint32_t computing,
               const core_t core_of[INDEX_REGISTER_BITS],
               const pass_t pass_of[INDEX_REGISTER_BITS], int t, int whole, int result_words, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    const int words = tile_results(t, whole, result_words);
rows:
    for (int row = 0; row < C::BATCH; ++row) {
        const int core = core_of[row].to_int();
        const int base = pass_of[row].to_int() * Shapes<C>::RESULT_WORDS;
        const int count = row_computes(computing, row) ? words : 0;
    words:
        for (int i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, Shapes<C>::RESULT_WORDS)
            out.write(results[core][base + i]);
        }
    }
}

// tiles: of the product, a DATAFLOW region each. Tiles are double-buffered: while one is multiplied, the next is fetched,
// and the ones before are scaled, finished and sent. The head skips the multiplication, so it has three copies.
template <class C>
void run_tiles(hls::stream<word_t> weights[C::PORTS],
               const int8_t q[C::CORES][Shapes<C>::PASSES * Shapes<C>::CHANNEL_WORDS][Shapes<C>::LANES],
               const float row_scale[C::CORES][Shapes<C>::PASSES], uint64_t occupied, uint32_t computing,
               const core_t core_of[INDEX_REGISTER_BITS],
               const pass_t pass_of[INDEX_REGISTER_BITS], int tiles, int tile_rows, int sums, int channel_words,
               int scale_words, int head_words, int channels, bool inner, int activated, bool bias, int tile_words, int tile_sums,
               int stream_words, int sum_words, int chunk, int scale_rows, int mac_steps, int scale_steps,
               int finish_steps, int whole, int result_words, float values[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS],
               hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    typedef Shapes<C> S;
tiles:
    for (int t = 0; t < tiles; ++t) {
        FASTCAR_DATAFLOW
        FASTCAR_TRIPS(1, MOST_CHANNELS)
        word_t head[S::PORTS][S::HEAD_WORDS];
        FASTCAR_PARTITION(head, 1)
        FASTCAR_BLOCKS(head, 3)
        word_t tile[S::PORTS][S::TILE_WORDS];
        FASTCAR_PARTITION(tile, 1)
        FASTCAR_TILE_MEMORY(tile)
        int32_t acc[S::CORES][S::PORTS][S::SUMS];
        FASTCAR_PARTITION(acc, 1)
        FASTCAR_PARTITION(acc, 2)
        float value[S::CORES][S::PORT_LANES][S::VALUES];
        FASTCAR_PARTITION(value, 1)
        FASTCAR_PARTITION(value, 2)
        word_t results[S::CORES][S::PASSES * S::RESULT_WORDS];
        FASTCAR_PARTITION(results, 1)
        fetch_tile<S>(weights, head_words, stream_words, head, tile);
        mac_tile<S>(tile, q, occupied, mac_steps, tile_words, sum_words, channel_words, acc);
        scale_tile<S>(head, acc, row_scale, occupied, scale_steps, tile_rows, scale_rows, sums, tile_sums, scale_words,
                      bias, value);
        finish_tile<C>(value, occupied, finish_steps, t, chunk, channels, inner, activated, values, results);
        send_tile<C>(results, computing, core_of, pass_of, t, whole, result_words, out);
    }
}

// One product: the bounds of its loops, then its tiles.
template <class C>
void run_product(hls::stream<word_t> weights[C::PORTS],
                 const int8_t q[C::CORES][Shapes<C>::PASSES * Shapes<C>::CHANNEL_WORDS][Shapes<C>::LANES],
                 const float row_scale[C::CORES][Shapes<C>::PASSES], uint64_t occupied, uint32_t computing,
                 const core_t core_of[INDEX_REGISTER_BITS],
                 const pass_t pass_of[INDEX_REGISTER_BITS], int passes, const Product& product,
                 float values[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS], hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    typedef Shapes<C> S;
    const int tile_words = product.tile * product.channel_words;
    const int tile_sums = product.tile * product.sums;
    const int chunk = product.tile * C::PORTS;
    const int scale_rows = scale_rows_of<C>(product);
    const int scale_steps = passes * product.sums * scale_rows * S::PORT_BLOCKS;
    const int sum_words = sum_words_of<C>(product);
    const int result_words = product.inner ? 0 : words_for(product.channels, FLOAT_LANES);
    run_tiles<C>(weights, q, row_scale, occupied, computing, core_of, pass_of, product.tiles, product.tile, product.sums,
                 product.channel_words, product.scale_words, product.head_words, product.channels, product.inner,
                 product.activated, product.bias, tile_words, tile_sums, product.head_words + tile_words, sum_words, chunk, scale_rows,
                 passes * tile_words, scale_steps, passes * chunk, chunk / FLOAT_LANES, result_words, values, out);
}

// Each row to its core and pass. rows: of the batch; words: of a row; four floats of a word unrolled.
template <class C>
void load_rows(hls::stream<word_t>& in, uint32_t computing,
               const core_t core_of[INDEX_REGISTER_BITS],
               const pass_t pass_of[INDEX_REGISTER_BITS], int inputs,
               float values[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS]) {
    FASTCAR_NO_INLINE
rows:
    for (int row = 0; row < C::BATCH; ++row) {
        const int core = core_of[row].to_int();
        const int pass = pass_of[row].to_int();
        const int count = row_computes(computing, row) ? inputs : 0;
    words:
        for (int k = 0; k < count; k += FLOAT_LANES) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, Shapes<C>::INPUTS / FLOAT_LANES + 1)
            const word_t word = in.read();
            for (int i = 0; i < FLOAT_LANES; ++i) {
                if (k + i < inputs) values[core][pass][k + i] = unpack_float(word, i);
            }
        }
    }
}

// The array: its rows (if any) through the products of the call. One call site, so one MAC array: an MLP's second product
// takes the activations that the first left in `values`. first_: of a draft's first product. `last_rows`, `last_passes`: rows and
// passes of the last product.
template <class C>
void compute(hls::stream<word_t>& in, hls::stream<word_t> weights[C::PORTS],
             const core_t core_of[INDEX_REGISTER_BITS], const pass_t pass_of[INDEX_REGISTER_BITS],
             uint32_t computing, uint32_t last_rows, int passes, int last_passes, int products, int first_channels, int first_tile,
             int first_tiles, int first_scale_words, int first_head_words, int first_activated, bool first_bias, int inputs,
             int channels, int tile, int tiles, int sums, int channel_words, int scale_words, int head_words, bool bias,
             const float gain[INDEX_REGISTER_BITS], hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    typedef Shapes<C> S;
    const Occupied occupied = occupied_places<C::CORES>(computing, last_rows, C::BATCH, core_of, pass_of);
    const Product last = {inputs, channels, tile, tiles, sums, channel_words, scale_words, head_words, false, bias, 0};
    Product first = first_product<C>();
    if (C::DRAFTS) {
        first.channels = first_channels;
        first.tile = first_tile;
        first.tiles = first_tiles;
        first.scale_words = first_scale_words;
        first.head_words = first_head_words;
        first.activated = first_activated;
        first.bias = first_bias;
    }
    float values[S::CORES][S::PASSES][S::INPUTS];
    FASTCAR_PARTITION(values, 1)
    FASTCAR_PARTITION_CYCLIC(values, 3, 4)
    FASTCAR_VALUE_MEMORY(values)
    int8_t q[S::CORES][S::PASSES * S::CHANNEL_WORDS][S::LANES];
    FASTCAR_PARTITION(q, 1)
    FASTCAR_RESHAPE(q, 3)
    float row_scale[S::CORES][S::PASSES];
    FASTCAR_PARTITION(row_scale, 0)
    load_rows<C>(in, computing, core_of, pass_of, products > 1 ? C::HIDDEN : inputs, values);
products:
    for (int number = 0; number < products; ++number) {
        FASTCAR_TRIPS(0, 2)
        const bool ends = number + 1 == products;
        const Product product = ends ? last : first;
        const int own_passes = ends ? last_passes : passes;
        if (C::DRAFTS && ends && last_rows != computing) {
            subtract_recalled<C>(last_rows, inputs, gain, core_of, pass_of, values);
        }
        quantize_rows<C>(values, own_passes, product.inputs, product.channel_words, q, row_scale);
        run_product<C>(weights, q, row_scale, ends ? occupied.last_rows : occupied.computing, ends ? last_rows : computing, core_of,
                       pass_of, own_passes, product, values, out);
    }
}

}  // namespace fastcar
