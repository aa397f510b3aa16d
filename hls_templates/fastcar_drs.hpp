// DRS controller: TAS and gate, Index Register, Mapping Registers, then one layer's instruction words -> dispatch records.
// Formats, order of checks and status codes: docs/reference/drs_table.md. Every loop is bounded, so it always ends.
#ifndef FASTCAR_DRS_HPP
#define FASTCAR_DRS_HPP

#include "fastcar_drs_table.hpp"
#include "fastcar_tas_core.hpp"

namespace fastcar {
namespace drs {

// Words of `result`.
enum ResultWord {
    R_STATUS,
    R_COUNT,
    R_INDEX_REGISTER,
    R_HELD,
    R_SCORES,
    R_CHAIN = R_SCORES + INDEX_REGISTER_BITS,
    R_RECORDS = R_CHAIN + INDEX_REGISTER_BITS
};

// What one call is about.
struct Call {
    uint32_t layer;
    uint32_t step;
    uint32_t query_words;
    uint32_t key_words;
    uint32_t held;
    uint32_t capacity;
};

// One layer's fields of the table.
struct Layer {
    uint32_t threshold;
    uint32_t factor;
    uint32_t prefetch;
    uint32_t prefetch_before;  // that of the layer before: how much of this layer's weights it fetched
    uint32_t next;
};

inline Layer read_layer(const uint32_t* table, const uint32_t header[HEADER_WORDS], uint32_t layer) {
    FASTCAR_NO_INLINE
    const uint32_t last = header[F_LAYERS] - 1;
    Layer fields;
    fields.threshold = table[header[F_THRESHOLDS] + layer];
    fields.factor = table[header[F_FACTORS] + layer];
    fields.prefetch = table[header[F_PREFETCH] + layer];
    fields.prefetch_before = table[header[F_PREFETCH] + (layer == 0 ? last : layer - 1)];
    fields.next = layer == last ? 0 : layer + 1;
    return fields;
}

inline bool has_gate(const Layer& layer) {
    FASTCAR_INLINE
    return (layer.factor & 0x7FFFFFFFu) != 0;
}

inline bool operands_fit(const uint32_t header[HEADER_WORDS], const Call& call) {
    FASTCAR_INLINE
    const uint32_t words = header[F_ROWS] * head_words_of(header);
    return call.query_words == words * header[F_HEADS] && call.key_words == words * header[F_KV_HEADS];
}

inline uint32_t all_rows(uint32_t rows) {
    FASTCAR_INLINE
    return 0xFFFFFFFFu >> (INDEX_REGISTER_BITS - rows);
}

// Scores and gate of the layer's rows; returns the Index Register.
template <int KEY_WORDS>
uint32_t decide(const uint32_t header[HEADER_WORDS], const Layer& layer, uint32_t step, const word_t* query,
                const word_t* key, const uint32_t chain[INDEX_REGISTER_BITS], float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    const uint32_t rows = header[F_ROWS];
    uint32_t replay = 0;
    if (has_gate(layer)) {
        const tas::HeadShape shape = {header[F_HEADS], header[F_KV_HEADS], head_words_of(header)};
        tas::scores_of_rows<KEY_WORDS>(query, key, rows, shape, float_of_bits(layer.factor), scores);
        replay = tas::rows_that_pass(scores, chain, rows, float_of_bits(layer.threshold), header[F_MAX_CHAIN]);
        replay = (header[F_FLAGS] & COUPLE_CFG) != 0 ? tas::couple_pairs(replay, rows) : replay;
        replay = step >= header[F_TOKENS_PER_FRAME] ? replay : 0;
    }
    return ~replay & all_rows(rows);
}

// Whether an instruction is dispatched; `held` is the layer in the prefetch buffer.
inline bool is_issued(uint32_t word, uint32_t index_register, int computing, const Layer& layer, uint32_t held) {
    FASTCAR_INLINE
    const int row = static_cast<int>(row_of(word) & 31u);
    switch (opcode_of(word)) {
        case LOAD_WEIGHTS:
            return computing > 0;
        case COMPUTE_MLP:
            return row_computes(index_register, row);
        case REPLAY_COPY:
            return !row_computes(index_register, row);
        case PREFETCH_NEXT:
            return computing == 0 && layer.prefetch != 0 && held != layer.next;
        default:
            return true;
    }
}

// The argument of a record; changes what the prefetch buffer holds.
inline uint32_t issue(uint32_t opcode, uint32_t number, const Layer& layer, uint32_t& held) {
    FASTCAR_INLINE
    uint32_t argument = 0;
    if (opcode == PREFETCH_NEXT) {
        argument = layer.prefetch;
        held = layer.next;
    } else if (opcode == LOAD_WEIGHTS && held == number) {
        argument = layer.prefetch_before;
        held = NO_LAYER;
    }
    return argument;
}

// Writes the records of `length` instruction words; returns OK, or QUEUE_FULL after the first `capacity` of them.
template <int CORES>
Status dispatch(const uint32_t program[MAX_LAYER_WORDS], int length, const uint32_t header[HEADER_WORDS],
                const Layer& layer, const Call& call, uint32_t index_register, uint32_t& held, uint32_t& count,
                uint32_t* result) {
    FASTCAR_NO_INLINE
    ap_uint<MappingBits<CORES>::VALUE> mapping[INDEX_REGISTER_BITS];
    const int computing = map_rows<MappingBits<CORES>::VALUE>(
        index_register, static_cast<int>(header[F_ROWS]), static_cast<int>(header[F_CORES]), mapping);
    Status status = OK;
    for (int i = 0; i < length; ++i) {
        FASTCAR_TRIPS(1, 128)
        const uint32_t word = program[i];
        const uint32_t opcode = opcode_of(word);
        if (is_issued(word, index_register, computing, layer, held)) {
            if (count == call.capacity) {
                status = QUEUE_FULL;
                break;
            }
            const uint32_t row = row_of(word);
            const uint32_t core = opcode == COMPUTE_MLP ? mapping[row & 31u].to_uint() : NO_UNIT;
            result[R_RECORDS + 2 * count] = (opcode << 24) | (row << 16) | (core << 8);
            result[R_RECORDS + 2 * count + 1] = issue(opcode, call.layer, layer, held);
            ++count;
        }
    }
    return status;
}

// New chain counts and scores of every row, after the decision.
inline void report_rows(uint32_t rows, uint32_t index_register, const float scores[INDEX_REGISTER_BITS],
                        const uint32_t chain[INDEX_REGISTER_BITS], bool scored, uint32_t* result) {
    FASTCAR_NO_INLINE
    for (uint32_t row = 0; row < rows; ++row) {
        FASTCAR_TRIPS(1, 32)
        const bool computes = row_computes(index_register, static_cast<int>(row));
        result[R_SCORES + row] = scored ? bits_of_float(scores[row]) : 0u;
        result[R_CHAIN + row] = computes ? 0u : chain[row] + 1u;
    }
}

// Every check, in the documented order; fills header, layer and program (`length` words before END).
template <class C>
Status prepare(const uint32_t* table, uint32_t table_bytes, const Call& call, uint32_t header[HEADER_WORDS],
               Layer& layer, uint32_t program[MAX_LAYER_WORDS], int& length) {
    FASTCAR_NO_INLINE
    const Status status = check_table<C>(table, table_bytes, header);
    if (status != OK) {
        return status;
    }
    if (call.layer >= header[F_LAYERS]) {
        return BAD_LAYER;
    }
    layer = read_layer(table, header, call.layer);
    if (has_gate(layer) && !operands_fit(header, call)) {
        return BAD_OPERANDS;
    }
    const uint32_t first = header[F_INSTRUCTIONS] + call.layer * header[F_LAYER_WORDS];
    length = fetch_layer(table, first, header[F_LAYER_WORDS], call.layer, header[F_ROWS], program);
    return length < 0 ? BAD_INSTRUCTION : OK;
}

// One layer of one decode forward. C: CORES and KEY_WORDS of this controller.
template <class C>
void control(const uint32_t* table, uint32_t table_bytes, const Call& call, const word_t* query, const word_t* key,
             const uint32_t* chain, uint32_t* result) {
    uint32_t header[HEADER_WORDS];
    uint32_t program[MAX_LAYER_WORDS];
    uint32_t chain_row[INDEX_REGISTER_BITS];
    float scores[INDEX_REGISTER_BITS];
    FASTCAR_PARTITION(header, 0)
    Layer layer = {0, 0, 0, 0, 0};
    uint32_t index_register = 0;
    uint32_t held = call.held;
    uint32_t count = 0;
    int length = 0;
    Status status = prepare<C>(table, table_bytes, call, header, layer, program, length);
    if (status == OK) {
        for (uint32_t row = 0; row < header[F_ROWS]; ++row) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(1, 32)
            chain_row[row] = chain[row];
        }
        index_register = decide<C::KEY_WORDS>(header, layer, call.step, query, key, chain_row, scores);
        report_rows(header[F_ROWS], index_register, scores, chain_row, has_gate(layer), result);
        status = dispatch<C::CORES>(program, length, header, layer, call, index_register, held, count, result);
    }
    result[R_STATUS] = static_cast<uint32_t>(status);
    result[R_COUNT] = count;
    result[R_INDEX_REGISTER] = index_register;
    result[R_HELD] = status == OK ? held : call.held;
}

}  // namespace drs
}  // namespace fastcar

#endif
