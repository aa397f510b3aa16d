// DECIDE: the TAS unit and the controller of a step, between rows on chip and the replay buffer.
#ifndef FASTCAR_STEP_DECIDE_HPP
#define FASTCAR_STEP_DECIDE_HPP

#include "fastcar_step_control.hpp"

namespace fastcar {
namespace step {

// What the controller reads of all rows: q, then x; the cached keys, then the x that the forward's slot keeps.
template <class T>
struct Operands {
    static const int QUERY = T::ROWS * (T::QUERY_WORDS + T::KEY_WORDS);
    static const int KEY = 2 * T::ROWS * T::KEY_WORDS;
};

inline uint32_t query_words_of(const Fields& f) {
    FASTCAR_INLINE
    return f.word[DECIDE_HEADS] * f.word[DECIDE_BLOCKS] * cache::BLOCK_FLOAT_WORDS;
}

inline uint32_t key_words_of(const Fields& f) {
    FASTCAR_INLINE
    return f.word[DECIDE_KEY_HEADS] * f.word[DECIDE_BLOCKS] * cache::BLOCK_FLOAT_WORDS;
}

// The first word of the x that the forward's slot keeps, row after row.
inline uint32_t kept_inputs(const Launch& launch, const Fields& f, uint32_t count) {
    FASTCAR_INLINE
    return f.word[DECIDE_INPUTS] + launch.step % f.word[DECIDE_STRIDE] * count * f.word[DECIDE_COUNT];
}

// The x that the forward's slot keeps, behind the cached keys.
template <class T>
void gather_inputs(const Launch& launch, const Fields& f, uint32_t count, const word_t* replay,
                   word_t key[Operands<T>::KEY]) {
    FASTCAR_NO_INLINE
    const uint32_t words = count * f.word[DECIDE_COUNT];
    const uint32_t first = kept_inputs(launch, f, count);
    const uint32_t target = count * key_words_of(f);
gather_kept_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, T::ROWS * T::KEY_WORDS)
        key[target + i] = replay[first + i];
    }
}

// Where a row computes, the slot keeps its x.
template <class D>
void keep_inputs(const Launch& launch, const Fields& f, uint32_t count, uint32_t computing,
                 const word_t rows[ROWS_ON_CHIP][D::ROWS][D::ROW_WORDS], word_t* replay) {
    FASTCAR_NO_INLINE
    uint32_t first = kept_inputs(launch, f, count);
keep_each_row:
    for (uint32_t b = 0; b < count; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const uint32_t words = ((computing >> b) & 1u) != 0 ? f.word[DECIDE_COUNT] : 0;
    keep_words:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::ROW_WORDS)
            replay[first + i] = rows[f.word[DECIDE_INPUT]][b][i];
        }
        first += f.word[DECIDE_COUNT];
    }
}

// Decides a layer. `computing` becomes the rows whose MLP computes; the new chain counts go to the replay buffer. Returns the
// status.
template <class T>
uint32_t call_controller(const uint32_t header[drs::HEADER_WORDS], const uint32_t words[T::TABLE_WORDS], const Launch& launch,
                         const Fields& f, uint32_t count, const word_t* constants, const word_t query[Operands<T>::QUERY],
                         const word_t key[Operands<T>::KEY], uint32_t& computing, word_t* replay,
                         uint32_t answer[drs::ANSWER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t slot = f.word[DECIDE_CHAIN] + launch.step % f.word[DECIDE_STRIDE] * CHAIN_BEATS;
    word_t chain[CHAIN_BEATS];
read_chain_counts:
    for (uint32_t i = 0; i < CHAIN_BEATS; ++i) {
        FASTCAR_PIPELINE(1)
        chain[i] = replay[slot + i];
    }
    const uint32_t input = f.word[DECIDE_COUNT];
    const drs::Call call = {0, f.layer, launch.step, count * (query_words_of(f) + input), count * (key_words_of(f) + input),
                            f.word[DECIDE_NETWORK], f.word[DECIDE_UNITS]};
    const uint32_t status = drs::decide_layer<T>(header, words, call, query, key, constants, chain, answer);
    const bool decided = status == drs::OK;
    answer[drs::R_STATUS] = status;
    computing = decided ? answer[drs::R_INDEX_REGISTER] : computing;
write_chain_counts:
    for (uint32_t i = 0; i < CHAIN_BEATS; ++i) {
        FASTCAR_PIPELINE(1)
        const uint32_t at = drs::R_CHAIN + FLOAT_LANES * i;
        replay[slot + i] = decided ? word_of_bits(answer[at], answer[at + 1], answer[at + 2], answer[at + 3]) : chain[i];
    }
    return status;
}

}  // namespace step
}  // namespace fastcar

#endif
