// DECIDE: the TAS unit and the controller of a step, between rows on chip and the replay buffer.
#pragma once

#include "fastcar_step_control.hpp"

namespace fastcar {
namespace step {

// What the controller reads of all rows: q or x; the cached keys, or the x that the forward's slot keeps.
template <class T>
struct Operands {
    static const int QUERY = T::ROWS * T::QUERY_WORDS;
    static const int KEY = T::ROWS * T::KEY_WORDS;
};

// Words of a row of q or x, and of its key or the x that its slot keeps: fields of what the gate does not read are 0.
inline uint32_t query_words_of(const Fields& f) {
    FASTCAR_INLINE
    return f.word[DECIDE_HEADS] * f.word[DECIDE_BLOCKS] * cache::BLOCK_FLOAT_WORDS + f.word[DECIDE_COUNT];
}

inline uint32_t key_words_of(const Fields& f) {
    FASTCAR_INLINE
    return f.word[DECIDE_KEY_HEADS] * f.word[DECIDE_BLOCKS] * cache::BLOCK_FLOAT_WORDS + f.word[DECIDE_COUNT];
}

// The x that the rows' slots keep.
template <class D, class T>
void gather_inputs(const Rows<D>& list, const Fields& f, const Sizes& sizes, const word_t* replay,
                   word_t key[Operands<T>::KEY]) {
    FASTCAR_NO_INLINE
    uint32_t target = 0;
gather_each_slot:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const uint32_t words = row_computes(list.deciding, b) ? f.word[DECIDE_COUNT] : 0;
        const uint32_t first = f.word[DECIDE_INPUTS] + slot_of<D>(list, sizes, f.word[DECIDE_STRIDE], b) * f.word[DECIDE_COUNT];
    gather_kept_words:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, T::KEY_WORDS)
            key[target + i] = replay[first + i];
        }
        target += f.word[DECIDE_COUNT];
    }
}

// Where a row of a decode forward computes, its slot keeps its x.
template <class D>
void keep_inputs(const Rows<D>& list, const Fields& f, const Sizes& sizes, uint32_t computing,
                 const word_t rows[ROWS_ON_CHIP][D::ROWS][D::ROW_WORDS], word_t* replay) {
    FASTCAR_NO_INLINE
keep_each_row:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const uint32_t words = row_computes(computing & list.deciding, b) ? f.word[DECIDE_COUNT] : 0;
        const uint32_t first = f.word[DECIDE_INPUTS] + slot_of<D>(list, sizes, f.word[DECIDE_STRIDE], b) * f.word[DECIDE_COUNT];
    keep_words:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::ROW_WORDS)
            replay[first + i] = rows[f.word[DECIDE_SOURCE]][b][i];
        }
    }
}

// Decides a layer. `computing` becomes the rows whose MLP computes; the new chain counts go to the replay buffer. Returns the
// status. A count has a memory word of its own, so that no row changes what another row of the launch has read.
template <class D, class T>
uint32_t call_controller(const uint32_t header[drs::HEADER_WORDS], const uint32_t words[T::TABLE_WORDS], const Rows<D>& list,
                         const Fields& f, const Sizes& sizes, const word_t* constants, const word_t query[Operands<T>::QUERY],
                         const word_t key[Operands<T>::KEY], uint32_t& computing, word_t* replay,
                         uint32_t answer[drs::ANSWER_WORDS]) {
    FASTCAR_NO_INLINE
    uint32_t counts[INDEX_REGISTER_BITS] = {};
read_chain_counts:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        if (row_computes(list.deciding, b)) {
            counts[b] = lane_bits(replay[f.word[DECIDE_CHAIN] + slot_of<D>(list, sizes, f.word[DECIDE_STRIDE], b)], 0);
        }
    }
    const drs::Call call = {f.layer, list.active, list.computes, sizes.rows * query_words_of(f), sizes.rows * key_words_of(f),
                            f.word[DECIDE_NETWORK], f.word[DECIDE_UNITS]};
    const uint32_t status = drs::decide_layer<T>(header, words, call, query, key, constants, counts, answer);
    const bool decided = status == drs::OK;
    answer[drs::R_STATUS] = status;
    computing = decided ? answer[drs::R_INDEX_REGISTER] : computing;
write_chain_counts:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        if (decided && row_computes(list.deciding, b)) {
            const uint32_t at = f.word[DECIDE_CHAIN] + slot_of<D>(list, sizes, f.word[DECIDE_STRIDE], b);
            replay[at] = word_of_bits(answer[drs::R_CHAIN + b], 0, 0, 0);
        }
    }
    return status;
}

}  // namespace step
}  // namespace fastcar
