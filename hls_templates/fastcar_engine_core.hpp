// What a call of the engine computes: an MLP or a draft (two products) or a linear (one), all on one MAC array. Plain functions over
// words and arrays, no streams. Loops run to the bounds of the product at hand; buffers have the sizes of the largest.
//
// In the first product of a gated MLP channel 2n is gate n and 2n + 1 is up n. tile * PORTS is a multiple of four, so that
// the channels of a tile are whole words of y, and gate n and up n share a tile.
#pragma once

#include "fastcar_numerics.hpp"
#include "fastcar_mapping.hpp"
#include "fastcar_tile.hpp"

namespace fastcar {

static const uint32_t OP_MLP = 0;
static const uint32_t OP_LINEAR = 1;
static const uint32_t OP_LINEAR_BIAS = 2;
static const uint32_t OP_DRAFT = 3;
static const int MOST_CHANNELS = 1 << 18;

// One matrix product: the bounds of its loops. `inner`: its values are activated and stay in the cores.
struct Product {
    int inputs;
    int channels;
    int tile;           // rows on one port
    int tiles;
    int sums;           // of one channel: one, or one per group
    int channel_words;  // words of one channel's weights
    int scale_words;    // words of the tile's scales on one port
    int head_words;     // the same with biases
    bool inner;
    bool bias;
    int activated;      // channels of an inner product that are neurons; a draft's linear features are behind them
};

// What one call computes, decoded once; products == 0: no row computes.
struct Call {
    uint32_t computing;  // rows that compute
    uint32_t last_rows;    // those that the last product computes: of a draft, the first half of them
    int products;
    int words;        // of every section
    int row_words;    // of x
    int result_words; // of a row of y
    Product first;    // of two
    Product last;
};

// Sizes of the buffers: the largest bounds of configuration C.
template <class C>
struct Shapes {
    typedef WeightFormat<C::WEIGHT_BITS> Format;
    static const int CORES = C::CORES;
    static const int PASSES = (C::BATCH + C::CORES - 1) / C::CORES;
    static const int PORTS = C::PORTS;
    static const int LANES = Format::LANES;
    static const int INPUTS = C::MAX_INPUTS;
    static const int TILE = C::MAX_TILE;
    static const int TILE_WORDS = C::MAX_TILE_WORDS;
    static const int TILE_SUMS = C::MAX_TILE_SUMS;
    static const int HEAD_WORDS = C::MAX_HEAD_WORDS;
    static const int CHANNEL_WORDS = C::MAX_CHANNEL_WORDS;
    static const int RESULT_WORDS = WordsFor<C::MAX_TILE * C::PORTS, FLOAT_LANES>::VALUE;
    // Ports that are scaled in one clock: a group of int4 lasts four words, so a quarter of them keeps pace.
    static const int PORT_LANES = Format::GROUPED ? (C::PORTS + 3) / 4 : 1;
    static const int PORT_BLOCKS = (C::PORTS + PORT_LANES - 1) / PORT_LANES;
    static const int SCALE_ROWS = Format::GROUPED ? C::SCALE_ROWS : 1;
    static const int SCALE_STEPS = (TILE_SUMS + SCALE_ROWS * C::MAX_SUMS) * PORT_BLOCKS;
    static const int SUMS = PASSES * TILE_SUMS;
    static const int VALUES = PASSES * TILE * PORT_BLOCKS;
    static_assert(SCALE_ROWS * PORT_BLOCKS == C::SCALE_DISTANCE, "a pragma takes a literal");
    static_assert(C::BATCH >= 1 && C::BATCH <= 32, "the Index Register has 32 bits");
    static_assert(C::CORES >= 1 && C::CORES <= C::BATCH, "a core without a row is never used");
    static_assert(C::PORTS % C::AXI_WORDS == 0, "an AXI port carries whole logical ports");
    static_assert(C::MAX_INPUTS <= 1 << 16, "an int32 sum holds 65536 products of int8");
};

inline int words_for(int count, int lanes) {
    FASTCAR_INLINE
    return (count + lanes - 1) / lanes;
}

template <class Format>
Product make_product(int inputs, int channels, int tile, int tiles, bool inner, bool bias) {
    FASTCAR_INLINE
    Product product;
    product.inputs = inputs;
    product.channels = channels;
    product.tile = tile;
    product.tiles = tiles;
    product.sums = Format::GROUPED ? words_for(inputs, Format::GROUP) : 1;
    product.channel_words = Format::GROUPED ? product.sums * (128 / Format::LANES) : words_for(inputs, Format::LANES);
    product.scale_words = words_for(tile * product.sums, Format::SCALE_LANES);
    product.head_words = product.scale_words + (bias ? words_for(tile, FLOAT_LANES) : 0);
    product.inner = inner;
    product.bias = bias;
    product.activated = inner ? channels : 0;
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
    return small && product.tile * product.channel_words <= S::TILE_WORDS && product.head_words <= S::HEAD_WORDS &&
           product.tile * product.sums <= S::TILE_SUMS && chunk % FLOAT_LANES == 0 && covered >= channels &&
           covered - chunk < channels;
}

// First product of the MLP: constants.
template <class C>
Product first_product() {
    FASTCAR_INLINE
    return make_product<typename Shapes<C>::Format>(C::HIDDEN, (C::GATED ? 2 : 1) * C::INTERMEDIATE, C::GATE_UP_TILE,
                                                    C::GATE_UP_TILES, true, C::UP_BIAS);
}

// The only product of a linear, or the second of the MLP: constants, too.
template <class C>
Product last_product(uint32_t op, int inputs, int channels, int tile, int tiles) {
    FASTCAR_INLINE
    typedef typename Shapes<C>::Format Format;
    return op == OP_MLP
               ? make_product<Format>(C::INTERMEDIATE, C::HIDDEN, C::DOWN_TILE, C::DOWN_TILES, false, C::DOWN_BIAS)
               : make_product<Format>(inputs, channels, tile, tiles, false, op == OP_LINEAR_BIAS);
}

// Words of one section that a product takes.
inline int product_words(const Product& product) {
    FASTCAR_INLINE
    return product.tiles * (product.head_words + product.tile * product.channel_words);
}

// Words of one sum, and rows of a tile in the loop over groups.
template <class C>
int sum_words_of(const Product& product) {
    FASTCAR_INLINE
    return product.sums == 1 ? product.channel_words : 128 / Shapes<C>::LANES;
}

template <class C>
int scale_rows_of(const Product& product) {
    FASTCAR_INLINE
    return product.sums == 1 || product.tile > Shapes<C>::SCALE_ROWS ? product.tile : Shapes<C>::SCALE_ROWS;
}

// An instruction of the array from its fields, which fit; bit b of `index_register`: row b computes.
template <class C>
Call decode(uint32_t index_register, uint32_t op, int inputs, int channels, int tile, int tiles) {
    FASTCAR_NO_INLINE
    const uint32_t all = 0xFFFFFFFFu >> (INDEX_REGISTER_BITS - C::BATCH);
    const Product last = last_product<C>(op, inputs, channels, tile, tiles);
    const bool whole = op == OP_MLP, computes = (index_register & all) != 0;
    Call call;
    call.computing = index_register & all;
    call.products = !computes ? 0 : whole ? 2 : 1;
    call.words = computes ? (whole ? product_words(first_product<C>()) : 0) + product_words(last) : 0;
    call.row_words = words_for(whole ? C::HIDDEN : last.inputs, FLOAT_LANES);
    call.result_words = words_for(last.channels, FLOAT_LANES);
    call.last_rows = call.computing;
    call.first = first_product<C>();
    call.last = last;
    call.last.tiles = computes ? last.tiles : 0;
    return call;
}

// The first product of a draft: its neurons, then its linear features.
template <class C>
Product draft_product(int neurons, int rank, int tile, int tiles, bool bias) {
    FASTCAR_INLINE
    const int activated = (C::GATED ? 2 : 1) * neurons;
    Product product = make_product<typename Shapes<C>::Format>(C::HIDDEN, activated + rank, tile, tiles, true, bias);
    product.activated = activated;
    return product;
}

template <class C>
bool draft_fits(int neurons, int rank, int tile, int tiles, bool bias, int outer_tile, int outer_tiles) {
    FASTCAR_INLINE
    const bool small = C::DRAFTS && neurons >= 1 && rank >= 1 && neurons <= Shapes<C>::INPUTS && rank <= Shapes<C>::INPUTS;
    const int channels = small ? (C::GATED ? 2 : 1) * neurons + rank : 1;
    return small && linear_fits<C>(C::HIDDEN, channels, tile, tiles, bias) &&
           linear_fits<C>(neurons + rank, C::HIDDEN, outer_tile, outer_tiles, false);
}

// A draft whose fields fit: rows b and b + BATCH / 2, x and the recalled x, through the first product; their difference through the second.
template <class C>
Call decode_draft(uint32_t replaying, int neurons, int rank, int tile, int tiles, bool bias, int outer_tile, int outer_tiles) {
    FASTCAR_NO_INLINE
    const bool computes = replaying != 0;
    const int features = computes ? neurons + rank : 1;
    Call call;
    call.last_rows = replaying;
    call.computing = call.last_rows | call.last_rows << (C::BATCH / 2);
    call.products = computes ? 2 : 0;
    call.first = draft_product<C>(computes ? neurons : 1, computes ? rank : 1, computes ? tile : 1, computes ? tiles : 0, bias);
    call.last = make_product<typename Shapes<C>::Format>(features, C::HIDDEN, computes ? outer_tile : 1, computes ? outer_tiles : 0, false, false);
    call.words = product_words(call.first) + product_words(call.last);
    call.row_words = words_for(C::HIDDEN, FLOAT_LANES);
    call.result_words = words_for(C::HIDDEN, FLOAT_LANES);
    return call;
}

// Of a draft: what the gain leaves of the features of the recalled x goes away from those of x, before the second product.
template <class C>
void subtract_recalled(uint32_t last_rows, int features, const float gain[INDEX_REGISTER_BITS],
                       const core_t core_of[INDEX_REGISTER_BITS], const pass_t pass_of[INDEX_REGISTER_BITS],
                       float values[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS]) {
    FASTCAR_NO_INLINE
subtract_each_row:
    for (int row = 0; row < C::BATCH / 2; ++row) {
        const int core = core_of[row].to_int(), pass = pass_of[row].to_int();
        const int other = core_of[row + C::BATCH / 2].to_int(), other_pass = pass_of[row + C::BATCH / 2].to_int();
        const int count = row_computes(last_rows, row) ? features : 0;
        // Four clocks for a word, as everywhere in a draft: one operator takes its values in turn.
    subtract_values:
        for (int k = 0; k < count; k += FLOAT_LANES) {
            FASTCAR_PIPELINE(4)
            FASTCAR_TRIPS(0, Shapes<C>::INPUTS / FLOAT_LANES + 1)
            FASTCAR_INDEPENDENT(values)
            for (int i = 0; i < FLOAT_LANES; ++i) {
                if (k + i < count) {
                    values[core][pass][k + i] = values[core][pass][k + i] - gain[row] * values[other][other_pass][k + i];
                }
            }
        }
    }
}

// Rows of all cores -> int8 and their scales, pass by pass.
// sizes: the largest |x| of a row; scales: one division per core; values: FLOAT_LANES of every core per clock.
template <class C>
void quantize_rows(const float values[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS], int passes, int inputs,
                   int channel_words, int8_t q[C::CORES][Shapes<C>::PASSES * Shapes<C>::CHANNEL_WORDS][Shapes<C>::LANES],
                   float row_scale[C::CORES][Shapes<C>::PASSES]) {
    FASTCAR_NO_INLINE
    typedef Shapes<C> S;
    const int padded = channel_words * S::LANES;
passes:
    for (int pass = 0; pass < passes; ++pass) {
        FASTCAR_TRIPS(1, S::PASSES)
        uint32_t amax[S::CORES] = {};
        float inverse[S::CORES];
        int8_t word[S::CORES][S::LANES] = {};
        FASTCAR_PARTITION(amax, 0)
        FASTCAR_PARTITION(inverse, 0)
        FASTCAR_PARTITION(word, 0)
    sizes:
        for (int k = 0; k < inputs; k += FLOAT_LANES) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(1, S::INPUTS / FLOAT_LANES + 1)
            FASTCAR_RECURRENCE(amax, 1)
            for (int c = 0; c < S::CORES; ++c) {
                float x[FLOAT_LANES];
                FASTCAR_PARTITION(x, 0)
                load_lanes<S::INPUTS>(values[c][pass], k, inputs, x);
                amax[c] = amax_step(amax[c], x, inputs - k);
            }
        }
    scales:
        for (int c = 0; c < S::CORES; ++c) {
            FASTCAR_PIPELINE(1)
            const float floored = row_amax_floor(float_of_bits(amax[c]));
            inverse[c] = 127.0f / floored;
            row_scale[c][pass] = floored * ONE_OVER_127;
        }
    values:
        for (int k = 0; k < padded; k += FLOAT_LANES) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(1, S::CHANNEL_WORDS * S::LANES / FLOAT_LANES)
            for (int c = 0; c < S::CORES; ++c) {
                float x[FLOAT_LANES];
                FASTCAR_PARTITION(x, 0)
                load_lanes<S::INPUTS>(values[c][pass], k, inputs, x);
                int8_t lanes[FLOAT_LANES];
                FASTCAR_PARTITION(lanes, 0)
                quantize_step(x, inverse[c], inputs - k, lanes);
                for (int i = 0; i < FLOAT_LANES; ++i) {
                    word[c][k % S::LANES + i] = lanes[i];
                }
                if (k % S::LANES == S::LANES - FLOAT_LANES) {
                    store_lanes<S::LANES>(word[c], q[c][pass * S::CHANNEL_WORDS + k / S::LANES]);
                }
            }
        }
    }
}

// The activated neuron of a channel, or of a gate and its up channel.
template <class C>
float finish_step(float now, float previous) {
    FASTCAR_INLINE
    const float act = Activate<C::ACTIVATION>::of(C::GATED ? previous : now);
    return C::GATED ? act * now : act;
}

// Values of tile t -> activated neurons in `values` (an inner product; features of a draft are behind them as they are), or whole
// words of y in `results`.
// channels: `steps` = passes * chunk, all cores side by side, in the order in which scale_tile leaves them. Four channels
// make a word of y; `previous` is the gate of an up channel.
template <class C>
void finish_tile(const float value[C::CORES][Shapes<C>::PORT_LANES][Shapes<C>::VALUES], uint64_t occupied, int steps,
                 int t, int chunk, int channels, bool inner, int activated,
                 float values[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS],
                 word_t results[C::CORES][Shapes<C>::PASSES * Shapes<C>::RESULT_WORDS]) {
    FASTCAR_NO_INLINE
    typedef Shapes<C> S;
    const int parts = C::GATED ? 2 : 1;
    const int first = t * chunk;
    const int gates = activated - activated / parts;
    float lanes[S::CORES][FLOAT_LANES] = {};
    float previous[S::CORES] = {};
    FASTCAR_PARTITION(lanes, 0)
    FASTCAR_PARTITION(previous, 0)
    uint64_t busy = occupied;
    int channel = 0, port = 0, lane = 0, place = 0, pass = 0;
channels:
    for (int i = 0; i < steps; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(4, S::PASSES * S::TILE * S::PORTS)
        FASTCAR_RECURRENCE(lanes, 1)
        FASTCAR_RECURRENCE(previous, 1)
        const bool real = first + channel < channels;
        const bool neuron = !C::DRAFTS || first + channel < activated;
        const bool whole = !neuron || channel % parts == parts - 1;
        const int feature = neuron ? (first + channel) / parts : first + channel - gates;
        for (int c = 0; c < S::CORES; ++c) {
            if (((busy >> c) & 1u) != 0) {
                const float now = real ? value[c][lane][place] : 0.0f;
                lanes[c][channel % FLOAT_LANES] = now;
                if (!inner && channel % FLOAT_LANES == FLOAT_LANES - 1) {
                    results[c][pass * S::RESULT_WORDS + channel / FLOAT_LANES] = pack_float(lanes[c]);
                }
                if (inner && real && whole) values[c][pass][feature] = neuron ? finish_step<C>(now, previous[c]) : now;
                previous[c] = now;
            }
        }
        const bool last_of_row = port == S::PORTS - 1;
        const bool last_of_pass = channel == chunk - 1;
        const bool last_of_block = last_of_row || lane == S::PORT_LANES - 1;
        port = last_of_row ? 0 : port + 1;
        lane = last_of_block ? 0 : lane + 1;
        place += last_of_block ? 1 : 0;
        channel = last_of_pass ? 0 : channel + 1;
        pass += last_of_pass ? 1 : 0;
        busy = last_of_pass ? busy >> S::CORES : busy;
    }
}

// Words of y that one row gets from tile t: `whole`, but for the last tile.
inline int tile_results(int t, int whole, int result_words) {
    FASTCAR_INLINE
    const int left = result_words - t * whole;
    return left < whole ? left : whole;
}

}  // namespace fastcar
