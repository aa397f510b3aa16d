// DECIDE: the TAS unit and the controller of a step, between rows on chip and the replay buffer.
#pragma once

#include "fastcar_step_control.hpp"

namespace fastcar {
namespace step {

// Words of a row of q or x, and of its key or the x that its slot keeps: fields of what the gate does not read are 0.
inline uint32_t query_words_of(const Fields& f) {
    FASTCAR_INLINE
    return f.word[DECIDE_HEADS] * f.word[DECIDE_BLOCKS] * cache::BLOCK_FLOAT_WORDS + f.word[DECIDE_COUNT];
}

inline uint32_t key_words_of(const Fields& f) {
    FASTCAR_INLINE
    return f.word[DECIDE_KEY_HEADS] * f.word[DECIDE_BLOCKS] * cache::BLOCK_FLOAT_WORDS + f.word[DECIDE_COUNT];
}

// Commits counts and kept x of a layer. Returns the rows whose MLP output is to be committed: those that computed, whose chains ended.
template <class D>
uint32_t commit_decisions(const Rows<D>& list, const Fields& f, const Sizes& sizes, word_t* replay) {
    FASTCAR_NO_INLINE
    uint32_t decided = 0, computed = 0;
read_staged_counts:
    for (uint32_t b = 0; b < sizes.staged; ++b) {
        FASTCAR_TRIPS(0, D::ROWS)
        const uint32_t count = lane_bits(replay[f.word[DECIDE_CHAIN] + written_of<D>(list, sizes, f.word[DECIDE_STRIDE], b)], 0);
        decided |= (list.before[b] != 0 ? 1u : 0u) << b;
        computed |= (list.before[b] != 0 && count == 0 ? 1u : 0u) << b;
    }
    commit_rows<D>(list, sizes, f.word[DECIDE_STRIDE], f.word[DECIDE_CHAIN], 1, decided, replay);
    commit_rows<D>(list, sizes, f.word[DECIDE_STRIDE], f.word[DECIDE_INPUTS], f.word[DECIDE_COUNT], computed, replay);
    return computed;
}

// The x that row b's slot keeps.
template <class D, class T>
void gather_inputs(const Rows<D>& list, const Fields& f, const Sizes& sizes, uint32_t b, const word_t* replay,
                   word_t key[T::KEY_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t words = row_computes(list.deciding, b) ? f.word[DECIDE_COUNT] : 0;
    const uint32_t first = f.word[DECIDE_INPUTS] + slot_of<D>(list, sizes, f.word[DECIDE_STRIDE], b) * f.word[DECIDE_COUNT];
gather_kept_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, T::KEY_WORDS)
        key[i] = replay[first + i];
    }
}

// Where a row of a decode forward computes, its slot keeps its x, or will.
template <class D>
void keep_inputs(const Rows<D>& list, const Fields& f, const Sizes& sizes, uint32_t computing,
                 const word_t a[D::ROWS][D::A_WORDS], word_t* replay) {
    FASTCAR_NO_INLINE
keep_each_row:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const uint32_t words = row_computes(computing & list.deciding, b) ? f.word[DECIDE_COUNT] : 0;
        const uint32_t first = f.word[DECIDE_INPUTS] + written_of<D>(list, sizes, f.word[DECIDE_STRIDE], b) * f.word[DECIDE_COUNT];
    keep_words:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::X_WORDS)
            replay[first + i] = a[b][i];
        }
    }
}

// Decides a layer whose rows have their scores. `computing` becomes the rows whose MLP computes; the new chain counts go to the
// replay buffer. A count has a memory word of its own, so that no row changes what another row of the launch has read.
template <class D>
void call_controller(const uint32_t header[drs::HEADER_WORDS], const Rows<D>& list, const Fields& f, const Sizes& sizes,
                     const drs::Layer& layer, const drs::Call& call, const float scores[INDEX_REGISTER_BITS], uint32_t& computing,
                     word_t* replay, uint32_t answer[drs::ANSWER_WORDS]) {
    FASTCAR_NO_INLINE
    uint32_t counts[INDEX_REGISTER_BITS] = {};
read_chain_counts:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        if (row_computes(list.deciding, b)) {
            counts[b] = lane_bits(replay[f.word[DECIDE_CHAIN] + slot_of<D>(list, sizes, f.word[DECIDE_STRIDE], b)], 0);
        }
    }
    drs::end_layer(header, layer, call, scores, counts, answer);
    computing = answer[drs::R_INDEX_REGISTER];
write_chain_counts:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        if (row_computes(list.deciding, b)) {
            const uint32_t at = f.word[DECIDE_CHAIN] + written_of<D>(list, sizes, f.word[DECIDE_STRIDE], b);
            replay[at] = word_of_bits(answer[drs::R_CHAIN + b], 0, 0, 0);
        }
    }
}

}  // namespace step
}  // namespace fastcar
