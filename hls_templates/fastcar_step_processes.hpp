// The DATAFLOW processes of a product that joins the array to rows on chip, beside those of the engine
// (fastcar_engine_processes.hpp), and those that append to the cache and gather what a gate reads.
#pragma once

#include <hls_stream.h>

#include "fastcar_engine_processes.hpp"
#include "fastcar_step_rows.hpp"

namespace fastcar {
namespace step {

// The rows that compute, in row order; of a draft then their recalled rows, each behind its own.
template <class C, class D>
void send_rows(const word_t a[D::ROWS][D::A_WORDS], uint32_t computing, int row_words, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
rows:
    for (int row = 0; row < C::BATCH; ++row) {
        const int count = row_computes(computing, row) ? row_words : 0;
    words:
        for (int i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, Shapes<C>::INPUTS)
            out.write(row < D::ROWS ? a[row][i] : a[row - D::ROWS][row_words + i]);
        }
    }
}

// Results in the order of the array: tiles, rows, words of a row's tile; to the rows on chip, or to memory (`leaves`).
template <class C, class D>
void keep_rows(uint32_t computing, int tiles, int whole, int result_words, bool leaves, hls::stream<word_t>& in,
               word_t y[D::ROWS][D::Y_WORDS], word_t* output) {
    FASTCAR_NO_INLINE
tiles:
    for (int t = 0; t < tiles; ++t) {
        FASTCAR_TRIPS(0, MOST_CHANNELS)
        const int words = tile_results(t, whole, result_words);
    rows:
        for (int row = 0; row < D::ROWS; ++row) {
            const int count = row_computes(computing, row) ? words : 0;
            const int kept = leaves ? 0 : count;
            const int left = leaves ? count : 0;
        kept_words:
            for (int i = 0; i < kept; ++i) {
                FASTCAR_PIPELINE(1)
                FASTCAR_TRIPS(0, Shapes<C>::RESULT_WORDS)
                y[row][t * whole + i] = in.read();
            }
        left_words:
            for (int i = 0; i < left; ++i) {
                FASTCAR_PIPELINE(1)
                FASTCAR_TRIPS(0, Shapes<C>::RESULT_WORDS)
                output[row * result_words + t * whole + i] = in.read();
            }
        }
    }
}

// Words of a head's exponents, behind those of its mantissas.
template <class D>
struct StoredHead {
    static const int EXPONENT_WORDS = (D::BLOCKS + INT8_LANES - 1) / INT8_LANES;
    static const int WORDS = D::BLOCKS * cache::BLOCK_WORDS + EXPONENT_WORDS;
};

// The heads of row b as the cache keeps them: every AXI port gets all of them.
template <class D, int AXI_PORTS>
void quantize_heads(const word_t y[D::ROWS][D::Y_WORDS], uint32_t b, uint32_t first, uint32_t heads, uint32_t blocks,
                    hls::stream<word_t> out[AXI_PORTS]) {
    FASTCAR_NO_INLINE
    uint32_t at = first;
quantize_each_head:
    for (uint32_t h = 0; h < heads; ++h) {
        FASTCAR_TRIPS(1, D::Y_WORDS)
        int8_t mantissas[D::BLOCKS * cache::BLOCK];
        int8_t exponents[D::BLOCKS];
        FASTCAR_PARTITION_CYCLIC(mantissas, 1, 16)
        FASTCAR_PARTITION(exponents, 0)
        quantize_row<D>(y[b], at, blocks, mantissas, exponents);
        const uint32_t words = blocks * cache::BLOCK_WORDS;
    send_words:
        for (uint32_t i = 0; i < words + StoredHead<D>::EXPONENT_WORDS; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(2, StoredHead<D>::WORDS)
            int8_t lanes[INT8_LANES];
            FASTCAR_PARTITION(lanes, 0)
            for (int lane = 0; lane < INT8_LANES; ++lane) {
                const uint32_t block = (i - words) * INT8_LANES + lane;
                lanes[lane] = i < words ? mantissas[i * INT8_LANES + lane] : block < blocks ? exponents[block] : int8_t(0);
            }
            for (int axi = 0; axi < AXI_PORTS; ++axi) {
                out[axi].write(pack_int8(lanes));
            }
        }
        at += blocks * cache::BLOCK_FLOAT_WORDS;
    }
}

// Stores `count` keys or values in the part of the cache of one AXI port. first, spacing: of the heads' beats; begin: `turned` of
// the first head (cache::port_of_key).
template <class C, class D>
void store_heads(hls::stream<word_t>& in, bool keys, uint32_t count, uint32_t blocks, uint32_t head_words, uint32_t first,
                 uint32_t spacing, uint32_t row, uint32_t begin, uint32_t axi, typename Beat<C::AXI_WORDS>::Type* cache) {
    FASTCAR_NO_INLINE
    uint32_t at = first;
    uint32_t turned = begin;
store_each_head:
    for (uint32_t n = 0; n < count; ++n) {
        FASTCAR_TRIPS(1, D::ROWS * D::Y_WORDS)
        int8_t mantissas[D::BLOCKS * cache::BLOCK];
        int8_t exponents[StoredHead<D>::EXPONENT_WORDS * INT8_LANES];
        FASTCAR_PARTITION_CYCLIC(mantissas, 1, 16)
        FASTCAR_PARTITION_CYCLIC(exponents, 1, 16)
    take_mantissas:
        for (uint32_t i = 0; i < blocks * cache::BLOCK_WORDS; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(2, D::BLOCKS * cache::BLOCK_WORDS)
            unpack_int8(in.read(), mantissas + i * INT8_LANES);
        }
    take_exponents:
        for (int i = 0; i < StoredHead<D>::EXPONENT_WORDS; ++i) {
            FASTCAR_PIPELINE(1)
            unpack_int8(in.read(), exponents + i * INT8_LANES);
        }
        if (keys) {
            cache::append_key<D::BLOCKS, C::PORTS, C::AXI_WORDS>(mantissas, exponents, blocks, at, row, turned, axi, cache);
        } else {
            cache::append_value<D::BLOCKS, C::PORTS, C::AXI_WORDS>(mantissas, exponents, blocks, head_words, at, row, axi, cache);
        }
        at += spacing;
        turned = cache::next_turn<C::PORTS>(turned);
    }
}

// `words` words of a row.
template <int WORDS, int ROW_WORDS>
void gather_row(uint32_t words, const word_t row[ROW_WORDS], word_t operand[WORDS]) {
    FASTCAR_NO_INLINE
gather_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, WORDS)
        operand[i] = row[i];
    }
}

// The keys at row `position` of the cache that are on AXI port `axi`, head after head: the exponents of their tile, then
// mantissas. first, spacing, begin: as of store_heads.
template <class C, class D>
void read_keys(const typename Beat<C::AXI_WORDS>::Type* cache, uint32_t axi, uint32_t heads, uint32_t first, uint32_t spacing,
               uint32_t position, uint32_t begin, uint32_t blocks, hls::stream<word_t>& out) {
    FASTCAR_NO_INLINE
    static const int AXI_WORDS = C::AXI_WORDS;
    uint32_t at = first;
    uint32_t turned = begin;
read_each_key:
    for (uint32_t n = 0; n < heads; ++n) {
        FASTCAR_TRIPS(0, D::ROWS * D::Y_WORDS)
        const uint32_t port = cache::port_of_key<C::PORTS>(position, turned);
        const int index = static_cast<int>(port % AXI_WORDS);
        const uint32_t own = port / AXI_WORDS == axi ? blocks : 0;
        const cache::KeyPlace place = cache::place_of_key(at, position / C::PORTS, blocks);
    read_key_exponents:
        for (uint32_t i = 0; i < own; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::BLOCKS)
            out.write(word_of_beat<AXI_WORDS>(cache[place.exponents + i], index));
        }
    read_key_mantissas:
        for (uint32_t i = 0; i < own * cache::BLOCK_WORDS; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::BLOCKS * cache::BLOCK_WORDS)
            out.write(word_of_beat<AXI_WORDS>(cache[place.mantissas + i], index));
        }
        at += spacing;
        turned = cache::next_turn<C::PORTS>(turned);
    }
}

// Those keys as float32 words, head after head.
template <class C, class D, int AXI_PORTS, int KEY_WORDS>
void expand_keys(hls::stream<word_t> in[AXI_PORTS], uint32_t heads, uint32_t position, uint32_t begin, uint32_t blocks,
                 word_t key[KEY_WORDS]) {
    FASTCAR_NO_INLINE
    uint32_t target = 0;
    uint32_t turned = begin;
expand_each_key:
    for (uint32_t n = 0; n < heads; ++n) {
        FASTCAR_TRIPS(1, D::ROWS * D::Y_WORDS)
        word_t words[3 * D::BLOCKS];
        const uint32_t owner = cache::port_of_key<C::PORTS>(position, turned) / C::AXI_WORDS;
    take_key:
        for (uint32_t i = 0; i < 3 * blocks; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(3, 3 * D::BLOCKS)
            for (uint32_t axi = 0; axi < AXI_PORTS; ++axi) {
                if (axi == owner) words[i] = in[axi].read();
            }
        }
        cache::expand_key<D::BLOCKS, KEY_WORDS>(words, position / C::PORTS, blocks, target, key);
        target += blocks * cache::BLOCK_FLOAT_WORDS;
        turned = cache::next_turn<C::PORTS>(turned);
    }
}

}  // namespace step
}  // namespace fastcar
