// The functions of attention for ctypes, at the sizes of the tests.
#include "fastcar_value_processes.hpp"

using fastcar::word_t;

namespace {

const int WORDS = 64;
const int BLOCKS = 4;
const int POSITIONS = 256;
const int TURNS = 8;

// The processes of one unit, one after another, on the sections of `PORTS` weight ports: the values of each follow its keys.
template <int HEADS, int PORTS>
void run(const word_t* query, uint32_t blocks, const word_t* cache, uint32_t key_words, uint32_t value_words,
         const fastcar::attention::Window& window, float factor, word_t* y) {
    using namespace fastcar::attention;
    namespace cache_of = fastcar::cache;
    typedef Totals<BLOCKS, PORTS, TURNS> Sizes;
    const word_t(&q)[1][WORDS] = *reinterpret_cast<const word_t(*)[1][WORDS]>(query);
    word_t(&a)[1][WORDS] = *reinterpret_cast<word_t(*)[1][WORDS]>(y);
    const uint32_t stride = PORTS * cache_of::KEY_ROWS, key_tiles = (window.rows + stride - 1) / stride;
    const uint32_t tiles = (window.rows + cache_of::TILE - 1) / cache_of::TILE;
    const uint32_t own = blocks * cache_of::BLOCK_WORDS * cache_of::KEY_ROWS, elements = blocks * Sizes::SLOTS;
    const uint32_t head = (2 * blocks + PORTS - 1) / PORTS, words = 2 * elements;
    const uint32_t turns = Sizes::turns(blocks);
    hls::stream<word_t> ports[PORTS], key_exponents[PORTS], keys[PORTS], value_exponents[PORTS], values[PORTS];
    hls::stream<LimbWords<HEADS> > queries, limbs;
    hls::stream<QueryScales<HEADS, BLOCKS> > query_scales;
    hls::stream<BlockSums<HEADS, PORTS, BLOCKS> > key_sums;
    hls::stream<BlockSums<HEADS, PORTS, 1> > value_sums;
    hls::stream<Logits<HEADS> > logits;
    hls::stream<Numerators<HEADS, 1> > numerators;
    hls::stream<Inverses<HEADS> > inverses;
    hls::stream<ScaledWeights<HEADS> > scaled;
    hls::stream<LargestWeights<HEADS, 1> > largest;
    hls::stream<WeightScales<HEADS, 1> > scales;
    for (int p = 0; p < PORTS; ++p) {
        read_cache<1>(cache + p * (key_words + value_words), 2, 1, 0, key_words, key_tiles * (blocks + own), key_words,
                      value_words, tiles * (head + words), ports[p]);
    }
    route_cache<PORTS, 1>(ports, 2, key_tiles * (blocks + own), blocks, blocks + own, tiles * (head + words), head, head + words,
                          key_exponents, keys, value_exponents, values);
    split_queries<HEADS, 1, BLOCKS, 1, WORDS>(q, 0, 1, 1, 1, HEADS, blocks, queries, query_scales);
    multiply_blocks<HEADS, PORTS, BLOCKS, BLOCKS>(keys, queries, 1, key_tiles * own, blocks, 1, true, key_sums);
    scale_logits<HEADS, PORTS, BLOCKS>(key_exponents, key_sums, query_scales, 1, 1, key_tiles * (blocks + stride), blocks,
                                       window.rows, 0, factor, logits);
    soften<HEADS, 1, POSITIONS>(logits, 1, tiles * cache_of::TILE, window.rows, &window, numerators, inverses);
    weigh_values<HEADS, 1, PORTS, BLOCKS>(value_exponents, numerators, tiles, head, blocks, scaled, largest);
    split_weights<HEADS, 1>(scaled, largest, tiles * blocks * QUADS, limbs, scales);
    multiply_blocks<HEADS, PORTS, BLOCKS, 1>(values, limbs, 1, tiles * words, blocks, Sizes::SLOTS, false, value_sums);
    add_values<HEADS, 1, PORTS, BLOCKS, TURNS, 1, WORDS>(value_sums, scales, inverses, 0, 1, 1, 1, HEADS, blocks, turns, tiles * turns, a);
}

}  // namespace

extern "C" {

// The numerator of every difference, which are at most 0.
void step_numerators(const float* differences, uint32_t count, int32_t* numerators) {
    for (uint32_t i = 0; i < count; ++i) {
        numerators[i] = fastcar::attention::numerator_of(differences[i]);
    }
}

// Returns 0 for a number of ports or heads that is not here.
int step_attend(uint32_t ports, uint32_t heads, const word_t* query, uint32_t blocks, const word_t* cache, uint32_t key_words,
                uint32_t value_words, uint32_t sinks, uint32_t begin, uint32_t count, uint32_t ring, uint32_t rows, float factor,
                word_t* y) {
    const fastcar::attention::Window window = {sinks, begin, count, ring, rows};
    switch (100 * heads + ports) {
        case 101:
            run<1, 1>(query, blocks, cache, key_words, value_words, window, factor, y);
            return 1;
        case 203:
            run<2, 3>(query, blocks, cache, key_words, value_words, window, factor, y);
            return 1;
        case 104:
            run<1, 4>(query, blocks, cache, key_words, value_words, window, factor, y);
            return 1;
        case 220:
            run<1, 120>(query, blocks, cache, key_words, value_words, window, factor, y);
            return 1;
        default:
            return 0;
    }
}

}  // extern "C"
