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

// One call of the controller: loads the control table, or decides a layer. `computing` becomes the rows whose MLP computes;
// the new chain counts go to the replay buffer. `crc`: of the table, which stays from call to call. Returns the status.
template <class T>
uint32_t call_controller(const Launch& launch, const Fields& f, uint32_t count, const word_t* program, const word_t* constants,
                         const word_t query[Operands<T>::QUERY], const word_t key[Operands<T>::KEY], uint32_t& crc,
                         uint32_t& computing, word_t* replay, word_t answer[ANSWER_BEATS]) {
    FASTCAR_NO_INLINE
    const bool loads = launch.op == LOAD_TABLE;
    const uint32_t slot = loads ? 0 : f.word[DECIDE_CHAIN] + launch.step % f.word[DECIDE_STRIDE] * CHAIN_BEATS;
    const uint32_t beats = loads ? 0 : CHAIN_BEATS;
    word_t chain[CHAIN_BEATS];
    word_t found[ANSWER_BEATS];
    crc = loads ? (launch.bytes >= 16 ? lane_bits(program[0], 2) : 0) : crc;
read_chain_counts:
    for (uint32_t i = 0; i < beats; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, CHAIN_BEATS)
        chain[i] = replay[slot + i];
    }
    const uint32_t input = f.word[DECIDE_COUNT];
    const drs::Call call = {crc, f.layer, launch.step, count * (query_words_of(f) + input), count * (key_words_of(f) + input),
                            f.word[DECIDE_NETWORK], f.word[DECIDE_UNITS]};
    drs::control<T>(loads ? drs::OP_TABLE : drs::OP_GATE, program, launch.bytes, call, query, key, constants, chain, found);
    const uint32_t status = lane_bits(found[0], 0);
    const bool decided = !loads && status == drs::OK;
    computing = decided ? lane_bits(found[0], drs::R_INDEX_REGISTER) : 0xFFFFFFFFu;
write_chain_counts:
    for (uint32_t i = 0; i < beats; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, CHAIN_BEATS)
        replay[slot + i] = decided ? found[drs::R_CHAIN / FLOAT_LANES + i] : chain[i];
    }
copy_answer:
    for (uint32_t i = 0; i < ANSWER_BEATS; ++i) {
        FASTCAR_PIPELINE(1)
        answer[i] = decided || i == 0 ? found[i] : word_t(0);
    }
    return status;
}

}  // namespace step
}  // namespace fastcar

#endif
