// DRS controller: decides one layer per call with the control table on chip: scores and gate -> Index Register and chain
// counts. Formats, order of checks and status codes: docs/reference/drs_table.md. Every loop is bounded, so it always ends.
#pragma once

#include <stdint.h>

#include "fastcar_format.hpp"
#include "fastcar_gate_core.hpp"

namespace fastcar {
namespace drs {

// ---- the table, loaded once, with its checks in the documented order. Products of fields are checked by multiplying; nothing is
// divided.

static const int SIZE_WORDS = F_VIDEOS - F_PORTS + 1;  // what a program needs, in the header

// CRC-32 (IEEE 802.3, reflected): one bit, then a word without a loop, so that it is one level of XORs per bit of the CRC.
inline uint32_t crc_bit(uint32_t crc) {
    FASTCAR_INLINE
    return (crc >> 1) ^ ((crc & 1u) != 0 ? 0xEDB88320u : 0u);
}

inline uint32_t crc_byte(uint32_t crc) {
    FASTCAR_INLINE
    const uint32_t half = crc_bit(crc_bit(crc_bit(crc_bit(crc))));
    return crc_bit(crc_bit(crc_bit(crc_bit(half))));
}

inline uint32_t crc_step(uint32_t crc, uint32_t word) {
    FASTCAR_INLINE
    return crc_byte(crc_byte(crc_byte(crc_byte(crc ^ word))));
}

inline bool within(uint32_t value, uint32_t least, uint32_t most) {
    FASTCAR_INLINE
    return value >= least && value <= most;
}

// The one multiplier of the checks; factors of at most 65,535 do not overflow.
inline uint32_t times(uint32_t a, uint32_t b) {
    FASTCAR_NO_INLINE
    return a * b;
}

// Whether a kernel's gate reads q and the key; else x and the cached x.
inline bool reads_query(uint32_t gate) {
    FASTCAR_INLINE
    return gate == GATE_TAS;
}

// The compiler divided; here it is checked that the quotients and products fit the heads.
inline bool heads_are_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t heads = header[F_HEADS];
    const uint32_t kv_heads = header[F_KV_HEADS];
    const uint32_t dim = header[F_HEAD_DIM];
    const uint32_t head_words = header[F_HEAD_WORDS];
    if (!within(heads, 1, MAX_COUNT) || !within(kv_heads, 1, MAX_COUNT) || !within(dim, 1, MAX_COUNT) ||
        !within(header[F_GROUP], 1, MAX_COUNT) || !within(head_words, 1, MAX_COUNT)) {
        return false;
    }
    return times(kv_heads, header[F_GROUP]) == heads && times(heads, dim) <= MAX_PRODUCTS && head_words == (dim + 3) >> 2;
}

// Call after heads_are_valid. Words of one row, and of all rows.
template <class C>
bool operands_are_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t query = header[F_ROW_QUERY_WORDS];
    const uint32_t key = header[F_ROW_KEY_WORDS];
    const uint32_t head_words = header[F_HEAD_WORDS];
    const bool row = reads_query(C::GATE) ? times(header[F_HEADS], head_words) == query && times(header[F_KV_HEADS], head_words) == key
                                          : within(query, 1, MAX_COUNT) && key == query;
    return row && query <= C::QUERY_WORDS && key <= C::KEY_WORDS && times(header[F_ROWS], query) == header[F_QUERY_WORDS] &&
           times(header[F_ROWS], key) == header[F_KEY_WORDS];
}

template <class C>
bool gate_is_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t flags = header[F_FLAGS];
    const uint32_t chain = header[F_MAX_CHAIN];
    const uint32_t period = header[F_REFRESH_PERIOD];
    const bool pairs = flags <= (COUPLE_CFG | WEIGHTED) && ((flags & COUPLE_CFG) == 0 || (header[F_ROWS] & 1u) == 0);
    const bool learned = C::GATE == GATE_LEARNED;
    const bool units = learned ? within(header[F_UNITS], 1, C::UNITS) : header[F_UNITS] == 0;
    const bool refresh = period == 0 || period >= header[F_TOKENS_PER_FRAME];
    return header[F_GATE] == C::GATE && units && refresh && pairs &&
           (within(chain, 1, MAX_CHAIN) || chain == UNLIMITED);
}

// Weights of chosen heads are for TAS alone, and need room.
template <class C>
bool heads_fit(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    return (header[F_FLAGS] & WEIGHTED) == 0 || (C::GATE == GATE_TAS && header[F_HEADS] <= C::HEADS);
}

template <class C>
bool counts_are_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    return within(header[F_LAYERS], 1, MAX_LAYERS) && within(header[F_ROWS], 1, C::ROWS) &&
           header[F_CORES] == static_cast<uint32_t>(C::CORES) && header[F_TOKENS_PER_FRAME] != 0;
}

// Call after counts_are_valid and heads_are_valid: then nothing here overflows. The program begins at a whole memory word.
template <class C>
bool length_is_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t layers = header[F_LAYERS], count = header[F_INSTRUCTIONS];
    const uint32_t weights = (header[F_FLAGS] & WEIGHTED) != 0 ? times(layers, header[F_HEADS]) : 0;
    uint32_t sizes = 0;
join_sizes:
    for (int i = 0; i < SIZE_WORDS; ++i) {
        FASTCAR_PIPELINE(1)
        sizes |= header[F_PORTS + i];
    }
    const bool empty = count != 0 || sizes == 0;
    return weights <= MAX_TABLE_WORDS && count <= static_cast<uint32_t>(C::INSTRUCTIONS) && empty &&
           header[F_WORDS] == (((HEADER_WORDS + 2 * layers + weights + 3) >> 2) << 2) + PROGRAM_WORDS * count;
}

// Word `at` of a table of `count` words goes on chip; returns the CRC with it. The first three words have no part in it.
template <class C>
uint32_t load_step(uint32_t crc, uint32_t word, uint32_t at, uint32_t count, uint32_t words[C::TABLE_WORDS]) {
    FASTCAR_INLINE
    if (at < count && at < static_cast<uint32_t>(C::TABLE_WORDS)) words[at] = word;
    return at > F_CRC && at < count ? crc_step(crc, word) : crc;
}

// Copies the 128-bit words first .. end - 1 of the table, four words of 32 bits each, in one burst; returns the CRC.
template <class C>
uint32_t load_words(const word_t* table, uint32_t first, uint32_t end, uint32_t count, uint32_t crc,
                    uint32_t words[C::TABLE_WORDS]) {
    FASTCAR_NO_INLINE
read_table:
    for (uint32_t i = first; i < end; ++i) {
        FASTCAR_PIPELINE(4)
        FASTCAR_TRIPS(1, (C::TABLE_WORDS + 16 * C::INSTRUCTIONS) / 4 + 1)
        const word_t word = table[i];
        crc = load_step<C>(crc, lane_bits(word, 0), 4 * i, count, words);
        crc = load_step<C>(crc, lane_bits(word, 1), 4 * i + 1, count, words);
        crc = load_step<C>(crc, lane_bits(word, 2), 4 * i + 2, count, words);
        crc = load_step<C>(crc, lane_bits(word, 3), 4 * i + 3, count, words);
    }
    return crc;
}

// Copies the table from memory and checks it as it comes; the program behind it is only counted. C: CORES, INSTRUCTIONS, ROWS, TABLE_WORDS, QUERY_WORDS, KEY_WORDS, GATE, UNITS
// and HEADS of this controller.
template <class C>
Status load_table(const word_t* table, uint32_t table_bytes, uint32_t header[HEADER_WORDS],
                  uint32_t words[C::TABLE_WORDS]) {
    FASTCAR_NO_INLINE
    static_assert(C::TABLE_WORDS >= static_cast<int>(HEADER_WORDS), "a table has a header");
    if (table_bytes < 4 * HEADER_WORDS) return TOO_SHORT;
    uint32_t crc = load_words<C>(table, 0, HEADER_WORDS / 4, HEADER_WORDS, 0xFFFFFFFFu, words);
copy_header:
    for (uint32_t i = 0; i < HEADER_WORDS; ++i) {
        FASTCAR_PIPELINE(1)
        header[i] = words[i];
    }
    if (header[F_MAGIC] != MAGIC) return BAD_MAGIC;
    if (header[F_VERSION] != VERSION) return BAD_VERSION;
    const uint32_t count = table_bytes >> 2;
    if ((table_bytes & 3u) != 0 || header[F_WORDS] != count || count > C::TABLE_WORDS + PROGRAM_WORDS * C::INSTRUCTIONS) {
        return BAD_LENGTH;
    }
    crc = load_words<C>(table, HEADER_WORDS / 4, (count + 3) >> 2, count, crc, words);
    if (~crc != header[F_CRC]) return BAD_CRC;
    if (!counts_are_valid<C>(header) || !gate_is_valid<C>(header) || !heads_are_valid(header) || !heads_fit<C>(header) ||
        !operands_are_valid<C>(header) || !length_is_valid<C>(header)) {
        return BAD_HEADER;
    }
    return OK;
}

// ---- the decision of a layer

// What one call is about. Bit b of `active` is 1: row b is there; of `computes`: it computes whatever its score is. The network
// of gate `learned` begins at word `network` of its operand, which holds at most `units` of it.
struct Call {
    uint32_t layer;
    uint32_t active;
    uint32_t computes;
    uint32_t query_words;
    uint32_t key_words;
    uint32_t network;
    uint32_t units;
};

// One layer's fields of the table.
struct Layer {
    uint32_t threshold;
    uint32_t factor;
    uint32_t weights;  // word of its first head's weight
};

template <class C>
Layer read_layer(const uint32_t words[C::TABLE_WORDS], const uint32_t header[HEADER_WORDS], uint32_t layer) {
    FASTCAR_NO_INLINE
    const uint32_t layers = header[F_LAYERS];
    Layer fields;
    fields.threshold = words[HEADER_WORDS + layer];
    fields.factor = words[HEADER_WORDS + layers + layer];
    fields.weights = HEADER_WORDS + 2 * layers + times(layer, header[F_HEADS]);
    return fields;
}

inline bool has_gate(const Layer& layer) {
    FASTCAR_INLINE
    return (layer.factor & 0x7FFFFFFFu) != 0;
}

// The layer's head weights, from the table into a memory of their own.
template <class C>
void load_weights(const uint32_t words[C::TABLE_WORDS], uint32_t first, uint32_t heads, uint32_t weights[C::HEAD_ROOM]) {
    FASTCAR_NO_INLINE
copy_weights:
    for (uint32_t head = 0; head < heads; ++head) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, C::HEAD_ROOM)
        weights[head] = words[first + head];
    }
}

// TAS of rows from `begin` to `end`. A kernel with room for head weights has a multiplier per lane; without weights in its table every head
// has the weight 1, which changes no bit.
template <class C>
void tas_scores(const uint32_t header[HEADER_WORDS], const uint32_t words[C::TABLE_WORDS], const Layer& layer,
                const word_t* query, const word_t* key, uint32_t begin, uint32_t end, float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    const tas::HeadShape shape = {header[F_GROUP], header[F_HEAD_WORDS], header[F_ROW_QUERY_WORDS], header[F_ROW_KEY_WORDS]};
    const float factor = float_of_bits(layer.factor);
    const bool weighted = (header[F_FLAGS] & WEIGHTED) != 0;
    uint32_t weights[C::HEAD_ROOM];
    if (C::HEADS > 0 && weighted) load_weights<C>(words, layer.weights, header[F_HEADS], weights);
    tas::scores_of_rows<C::QUERY_WORDS, C::KEY_WORDS, C::HEADS, C::HEAD_ROOM>(query, key, begin, end, shape, factor, weighted, weights, scores);
}

// What the gate compares with its threshold, for rows from `begin` to `end`, whose operands follow each other. A kernel is built for one gate, so one branch is left.
template <class C>
void score_rows(const uint32_t header[HEADER_WORDS], const uint32_t words[C::TABLE_WORDS], const Layer& layer,
                const Call& call, const word_t* query, const word_t* key, const word_t* network,
                uint32_t begin, uint32_t end, float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    const uint32_t input = header[F_ROW_QUERY_WORDS];
    if (C::GATE == GATE_INPUT_DELTA) {
        gate::change_scores<C::KEY_WORDS>(query, key, begin, end, input, scores);
    } else if (C::GATE == GATE_LEARNED) {
        gate::network_scores<C::KEY_WORDS, C::UNITS>(query, key, begin, end, input, network, call.network, call.units, scores);
    } else {
        tas_scores<C>(header, words, layer, query, key, begin, end, scores);
    }
}

// value mod divisor, a bit per clock, so that nothing is divided; divisor != 0.
inline uint32_t remainder_step(uint32_t rest, uint32_t bit, uint32_t divisor) {
    FASTCAR_INLINE
    const uint64_t next = (static_cast<uint64_t>(rest) << 1) | bit;
    return static_cast<uint32_t>(next >= divisor ? next - divisor : next);
}

inline uint32_t remainder_of(uint32_t value, uint32_t divisor) {
    FASTCAR_NO_INLINE
    uint32_t rest = 0;
shift_bits:
    for (int i = 0; i < 32; ++i) {
        FASTCAR_PIPELINE(1)
        rest = remainder_step(rest, (value >> (31 - i)) & 1u, divisor);
    }
    return rest;
}

// Whether a row computes in this forward whatever its score is: in the first frame, and in the frames of the refresh.
inline bool recomputes(const uint32_t header[HEADER_WORDS], uint32_t step) {
    FASTCAR_NO_INLINE
    const uint32_t frame = header[F_TOKENS_PER_FRAME];
    const uint32_t period = header[F_REFRESH_PERIOD];
    return step < frame || (period != 0 && remainder_of(step, period) < frame);
}

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
