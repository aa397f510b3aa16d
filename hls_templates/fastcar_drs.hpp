// DRS controller: loads the control table once, then decides one layer per call: TAS and gate, Index Register, Mapping
// Registers, instruction words -> row queue of the array, and dispatch records. Formats, order of checks and status codes:
// docs/reference/drs_table.md. Every loop is bounded, so it always ends.
#ifndef FASTCAR_DRS_HPP
#define FASTCAR_DRS_HPP

#include "fastcar_drs_scores.hpp"

namespace fastcar {
namespace drs {

// Values of the argument `op`; with any other the controller reads and writes nothing.
static const uint32_t OP_EXECUTE = 0;  // an MLP: what was dispatched for its layer
static const uint32_t OP_TABLE = 3;
static const uint32_t OP_GATE = 4;

// 32-bit words of `result`.
enum ResultWord {
    R_STATUS,
    R_COUNT,
    R_INDEX_REGISTER,
    R_HELD,
    R_SCORES,
    R_CHAIN = R_SCORES + INDEX_REGISTER_BITS,
    R_RECORDS = R_CHAIN + INDEX_REGISTER_BITS
};
static const int ANSWER_WORDS = R_RECORDS + 2 * MAX_LAYER_WORDS;
static const uint32_t NO_PLACE = NO_UNIT << 8 | NO_UNIT;

// What the array has to do for a layer: rows that compute, each with its core and pass, rows that are copied, whether the
// weights begin in the prefetch buffer, and whether the buffer is filled with the next layer's.
struct Queue {
    uint32_t layer;
    uint32_t computing;
    uint32_t copied;
    bool held;
    bool fills;
};

inline bool operands_fit(const uint32_t header[HEADER_WORDS], const Call& call) {
    FASTCAR_INLINE
    return call.query_words == header[F_QUERY_WORDS] && call.key_words == header[F_KEY_WORDS];
}

inline uint32_t all_rows(uint32_t rows) {
    FASTCAR_INLINE
    return 0xFFFFFFFFu >> (INDEX_REGISTER_BITS - rows);
}

// Chain counts, four to a word, in one burst.
inline void read_chain(const word_t* chain, uint32_t rows, uint32_t counts[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    const uint32_t words = (rows + 3) >> 2;
    FASTCAR_BURST(CHAIN)
read_counts:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, 8)
        FASTCAR_BEAT(CHAIN, i)
        const word_t word = chain[i];
        counts[4 * i] = lane_bits(word, 0);
        counts[4 * i + 1] = lane_bits(word, 1);
        counts[4 * i + 2] = lane_bits(word, 2);
        counts[4 * i + 3] = lane_bits(word, 3);
    }
}

// Scores and gate of the layer's rows; returns the Index Register. Without a gate every score is 0, and the mask decides.
template <class C>
uint32_t decide(const uint32_t header[HEADER_WORDS], const uint32_t words[C::TABLE_WORDS], const Layer& layer,
                const Call& call, const word_t* query, const word_t* key, const word_t* network,
                const uint32_t counts[INDEX_REGISTER_BITS], float scores[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    const uint32_t rows = header[F_ROWS];
    uint32_t replay = ~call.mask;
clear_scores:
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        scores[row] = 0.0f;
    }
    if (has_gate(layer)) {
        score_rows<C>(header, words, layer, call, query, key, network, scores);
        replay = tas::rows_that_pass(scores, counts, rows, float_of_bits(layer.threshold), header[F_MAX_CHAIN]);
        replay = (header[F_FLAGS] & COUPLE_CFG) != 0 ? tas::couple_pairs(replay, rows) : replay;
        replay = recomputes(header, call.step) ? 0 : replay;
    }
    return ~replay & all_rows(rows);
}

// Whether an instruction is dispatched; `held` is the layer in the prefetch buffer.
inline bool is_issued(uint32_t word, uint32_t index_register, const Layer& layer, uint32_t held) {
    FASTCAR_INLINE
    const int row = static_cast<int>(row_of(word) & 31u);
    switch (opcode_of(word)) {
        case LOAD_WEIGHTS:
            return index_register != 0;
        case COMPUTE_MLP:
            return row_computes(index_register, row);
        case REPLAY_COPY:
            return !row_computes(index_register, row);
        case PREFETCH_NEXT:
            return index_register == 0 && layer.prefetch != 0 && held != layer.next;
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

// Puts an instruction into the queue.
inline void enqueue(uint32_t opcode, uint32_t row, uint32_t argument, Queue& queue) {
    FASTCAR_INLINE
    const uint32_t bit = 1u << (row & 31u);
    queue.computing |= opcode == COMPUTE_MLP ? bit : 0u;
    queue.copied |= opcode == REPLAY_COPY ? bit : 0u;
    queue.held = queue.held || (opcode == LOAD_WEIGHTS && argument != 0);
    queue.fills = queue.fills || opcode == PREFETCH_NEXT;
}

// Fetches the layer's instruction words up to END, discards each or puts it into the queue, and appends its record to the
// answer. Returns OK, or QUEUE_FULL after the first `capacity` records.
template <class C>
Status dispatch(const uint32_t words[C::TABLE_WORDS], const uint32_t header[HEADER_WORDS], const Layer& layer,
                const Call& call, uint32_t index_register, uint32_t& held, uint32_t& count, Queue& queue,
                core_t core_of[INDEX_REGISTER_BITS], pass_t pass_of[INDEX_REGISTER_BITS],
                uint32_t answer[ANSWER_WORDS]) {
    FASTCAR_NO_INLINE
    place_rows<PLACE_BITS>(index_register, static_cast<int>(header[F_ROWS]), static_cast<int>(header[F_CORES]), core_of,
                          pass_of);
    bool ended = false;
    bool full = false;
fetch_instructions:
    for (uint32_t i = 0; i < header[F_LAYER_WORDS]; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, MAX_LAYER_WORDS)
        const uint32_t word = words[layer.program + i];
        const uint32_t opcode = opcode_of(word);
        ended = ended || opcode == END;
        const bool issued = !ended && is_issued(word, index_register, layer, held);
        full = full || (issued && count == call.capacity);
        if (issued && !full) {
            const uint32_t row = row_of(word);
            const uint32_t place = core_of[row & 31u].to_uint() << 8 | pass_of[row & 31u].to_uint();
            const uint32_t argument = issue(opcode, call.layer, layer, held);
            answer[R_RECORDS + 2 * count] = opcode << 24 | row << 16 | (opcode == COMPUTE_MLP ? place : NO_PLACE);
            answer[R_RECORDS + 2 * count + 1] = argument;
            enqueue(opcode, row, argument, queue);
            ++count;
        }
    }
    return full ? QUEUE_FULL : OK;
}

// Scores and new chain counts of every row, after the decision; zeros without a gate and beyond the rows.
inline void report_rows(uint32_t rows, bool gated, uint32_t index_register, const float scores[INDEX_REGISTER_BITS],
                        const uint32_t counts[INDEX_REGISTER_BITS], uint32_t answer[ANSWER_WORDS]) {
    FASTCAR_NO_INLINE
report_each_row:
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        const bool replays = gated && static_cast<uint32_t>(row) < rows && !row_computes(index_register, row);
        answer[R_SCORES + row] = bits_of_float(scores[row]);
        answer[R_CHAIN + row] = replays ? counts[row] + 1u : 0u;
    }
}

// The first words of the answer, in one burst of 128-bit words.
inline void write_answer(const uint32_t answer[ANSWER_WORDS], uint32_t count, word_t* result) {
    FASTCAR_NO_INLINE
    const uint32_t words = (count + 3) >> 2;
    FASTCAR_BURST(RESULT)
write_words:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, ANSWER_WORDS / 4)
        FASTCAR_BEAT(RESULT, i)
        result[i] = word_of_bits(answer[4 * i], answer[4 * i + 1], answer[4 * i + 2], answer[4 * i + 3]);
    }
}

// One layer of one decode forward, with the table on chip. Returns the status; `length` words of the answer are filled
// behind its first four.
template <class C>
Status schedule(const uint32_t header[HEADER_WORDS], const uint32_t words[C::TABLE_WORDS], const Layer& layer,
                const Call& call, const word_t* query, const word_t* key, const word_t* network, const word_t* chain, Queue& queue,
                core_t core_of[INDEX_REGISTER_BITS], pass_t pass_of[INDEX_REGISTER_BITS],
                uint32_t answer[ANSWER_WORDS], uint32_t& length) {
    FASTCAR_NO_INLINE
    uint32_t counts[INDEX_REGISTER_BITS];
    float scores[INDEX_REGISTER_BITS];
    if (has_gate(layer) && !operands_fit(header, call)) {
        return BAD_OPERANDS;
    }
    read_chain(chain, header[F_ROWS], counts);
    const uint32_t index_register = decide<C>(header, words, layer, call, query, key, network, counts, scores);
    uint32_t held = call.held;
    uint32_t count = 0;
    report_rows(header[F_ROWS], has_gate(layer), index_register, scores, counts, answer);
    const Status status = dispatch<C>(words, header, layer, call, index_register, held, count, queue, core_of, pass_of, answer);
    queue.layer = status == OK ? call.layer : NO_LAYER;
    answer[R_COUNT] = count;
    answer[R_INDEX_REGISTER] = index_register;
    answer[R_HELD] = status == OK ? held : call.held;
    length = R_RECORDS + 2 * count;
    answer[length] = 0;  // the spare lanes of the last 128-bit word
    answer[length + 1] = 0;
    return status;
}

// What is on chip: the table from load to load, and the queue from a decision to its execution.
//
// GATE fills the queue. EXECUTE of a layer with a gate needs the queue of this layer, once; one without a gate is scheduled
// by the mask at once. The functions have internal linkage, so that all of it belongs to this kernel alone, whatever else a
// process loads. Returns what the array has to do now; its layer is NO_LAYER when that is nothing.
template <class C>
static Queue control(uint32_t op, const word_t* table, uint32_t table_bytes, const Call& call, const word_t* query,
                     const word_t* key, const word_t* network, const word_t* chain, core_t core_of[INDEX_REGISTER_BITS],
                     pass_t pass_of[INDEX_REGISTER_BITS], word_t* result) {
    FASTCAR_NO_INLINE
    static_assert(C::TABLE_WORDS <= static_cast<int>(MAX_TABLE_WORDS), "word offsets of the format");
    static bool loaded = false;
    static uint32_t header[HEADER_WORDS];
    static uint32_t words[C::TABLE_WORDS];
    static Queue stored = {NO_LAYER, 0, 0, false, false};
    static core_t stored_core[INDEX_REGISTER_BITS];
    static pass_t stored_pass[INDEX_REGISTER_BITS];
    FASTCAR_PARTITION(header, 0)
    uint32_t answer[ANSWER_WORDS];
    FASTCAR_PARTITION_CYCLIC(answer, 1, 4)
    answer[R_COUNT] = 0;
    answer[R_INDEX_REGISTER] = 0;
    answer[R_HELD] = call.held;
    uint32_t length = R_SCORES;
    Queue now = {NO_LAYER, 0, 0, false, false};
    Status status = NO_TABLE;
    if (op == OP_TABLE) {
        status = load_table<C>(table, table_bytes, header, words);
        loaded = status == OK;
        stored.layer = NO_LAYER;
    } else if (loaded && header[F_CRC] == call.crc) {
        status = BAD_LAYER;
        if (call.layer < header[F_LAYERS]) {
            Layer layer = read_layer<C>(words, header, call.layer);
            const bool executes = op == OP_EXECUTE && has_gate(layer);
            layer.prefetch = op == OP_EXECUTE ? 0 : layer.prefetch;  // the weights given are this layer's
            if (!executes) {
                stored = now;
                status = schedule<C>(header, words, layer, call, query, key, network, chain, stored, stored_core, stored_pass,
                                     answer, length);
            } else {
                status = stored.layer == call.layer ? OK : NO_DISPATCH;
                answer[R_INDEX_REGISTER] = status == OK ? stored.computing : 0u;
            }
            // A decision only fills the prefetch buffer, and only when nothing computes.
            if (status == OK && (op == OP_EXECUTE || stored.fills)) {
                now = stored;
                stored.layer = op == OP_EXECUTE ? NO_LAYER : stored.layer;
            }
        }
    }
copy_places:
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        core_of[row] = stored_core[row];
        pass_of[row] = stored_pass[row];
    }
    answer[R_STATUS] = static_cast<uint32_t>(status);
    write_answer(answer, length, result);
    return now;
}

}  // namespace drs
}  // namespace fastcar

#endif
