// DRS controller: decides one layer per call with the control table on chip: scores and gate -> Index Register and chain
// counts. Formats, order of checks and status codes: docs/reference/drs_table.md. Every loop is bounded, so it always ends.
#pragma once

#include "fastcar_drs_scores.hpp"

namespace fastcar {
namespace drs {

inline bool operands_fit(const uint32_t header[HEADER_WORDS], const Call& call) {
    FASTCAR_INLINE
    return call.query_words == header[F_QUERY_WORDS] && call.key_words == header[F_KEY_WORDS];
}

inline uint32_t all_rows(uint32_t rows) {
    FASTCAR_INLINE
    return 0xFFFFFFFFu >> (INDEX_REGISTER_BITS - rows);
}

// The fields of a call's layer, and a score of 0 of every row: without a gate it stays, and every row computes.
template <class C>
Status begin_layer(const uint32_t header[HEADER_WORDS], const uint32_t words[C::TABLE_WORDS], const Call& call, Layer& layer,
                   float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
clear_scores:
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        scores[row] = 0.0f;
    }
    if (call.layer >= header[F_LAYERS]) return BAD_LAYER;
    layer = read_layer<C>(words, header, call.layer);
    return has_gate(layer) && !operands_fit(header, call) ? BAD_OPERANDS : OK;
}

// The gate of a layer whose rows have their scores; returns the Index Register.
inline uint32_t decide(const uint32_t header[HEADER_WORDS], const Layer& layer, const Call& call,
                       const float scores[INDEX_REGISTER_BITS], const uint32_t counts[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    const uint32_t rows = header[F_ROWS];
    uint32_t replay = 0;
    if (has_gate(layer)) {
        replay = tas::rows_that_pass(scores, counts, rows, float_of_bits(layer.threshold), header[F_MAX_CHAIN]);
        replay &= ~call.computes;
        replay = (header[F_FLAGS] & COUPLE_CFG) != 0 ? tas::couple_pairs(replay, rows) : replay;
    }
    return ~replay & call.active & all_rows(rows);
}

// Scores and new chain counts of every row, after the decision; zeros without a gate and of rows that are not there.
inline void report_rows(uint32_t rows, bool gated, uint32_t index_register, const float scores[INDEX_REGISTER_BITS],
                        const uint32_t counts[INDEX_REGISTER_BITS], uint32_t answer[ANSWER_WORDS]) {
    FASTCAR_NO_INLINE
report_each_row:
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        const bool here = row_computes(rows, row), replays = gated && here && !row_computes(index_register, row);
        answer[R_SCORES + row] = here ? bits_of_float(scores[row]) : 0u;
        answer[R_CHAIN + row] = replays ? counts[row] + 1u : 0u;
    }
}

// The first memory words of the answer, in one burst.
inline void write_answer(const uint32_t answer[ANSWER_WORDS], int beats, word_t* result) {
    FASTCAR_NO_INLINE
write_words:
    for (int i = 0; i < beats; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, ANSWER_WORDS / 4)
        result[i] = word_of_bits(answer[4 * i], answer[4 * i + 1], answer[4 * i + 2], answer[4 * i + 3]);
    }
}

// The answer of a layer whose rows have their scores.
inline void end_layer(const uint32_t header[HEADER_WORDS], const Layer& layer, const Call& call,
                      const float scores[INDEX_REGISTER_BITS], const uint32_t counts[INDEX_REGISTER_BITS],
                      uint32_t answer[ANSWER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t index_register = decide(header, layer, call, scores, counts);
    report_rows(call.active & all_rows(header[F_ROWS]), has_gate(layer), index_register, scores, counts, answer);
    answer[R_INDEX_REGISTER] = index_register;
}

// One layer of one decode forward, with the table on chip and the operands of all rows.
template <class C>
Status decide_layer(const uint32_t header[HEADER_WORDS], const uint32_t words[C::TABLE_WORDS], const Call& call,
                    const word_t* query, const word_t* key, const word_t* network,
                    const uint32_t counts[INDEX_REGISTER_BITS], uint32_t answer[ANSWER_WORDS]) {
    FASTCAR_NO_INLINE
    float scores[INDEX_REGISTER_BITS];
    Layer layer;
    const Status status = begin_layer<C>(header, words, call, layer, scores);
    if (status == OK) {
        if (has_gate(layer)) score_rows<C>(header, words, layer, call, query, key, network, 0, header[F_ROWS], scores);
        end_layer(header, layer, call, scores, counts, answer);
    }
    return status;
}

}  // namespace drs
}  // namespace fastcar
