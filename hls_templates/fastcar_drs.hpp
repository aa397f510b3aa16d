// DRS controller: checks a control table, then turns one layer's instruction words into dispatch records.
// Format, order of checks and status codes: docs/drs_table.md. Every loop is bounded, so it always ends.
#ifndef FASTCAR_DRS_HPP
#define FASTCAR_DRS_HPP

#include <stdint.h>

#include "fastcar_mapping.hpp"

namespace fastcar {
namespace drs {

static const uint32_t MAGIC = 0x53524446u;  // "FDRS"
static const uint32_t VERSION = 1;
static const uint32_t HEADER_WORDS = 12;
static const uint32_t MAX_TABLE_WORDS = 65536;
static const uint32_t MAX_LAYER_WORDS = 128;
static const uint32_t MAX_LAYERS = 65535;
static const uint32_t NO_UNIT = 0xFFu;

enum Field {
    F_MAGIC,
    F_VERSION,
    F_CRC,
    F_WORDS,
    F_LAYERS,
    F_ROWS,
    F_CORES,
    F_TOKENS_PER_FRAME,
    F_LAYER_WORDS,
    F_THRESHOLDS,
    F_INSTRUCTIONS,
    F_RESERVED
};

enum Status {
    OK,
    TOO_SHORT,
    BAD_MAGIC,
    BAD_VERSION,
    BAD_LENGTH,
    BAD_CRC,
    BAD_HEADER,
    BAD_LAYER,
    BAD_INSTRUCTION,
    QUEUE_FULL
};

enum Opcode { LOAD_WEIGHTS = 1, COMPUTE_MLP = 2, REPLAY_COPY = 3, PREFETCH_NEXT = 4, BARRIER = 5, END = 6 };

// CRC-32 (IEEE 802.3, reflected) over whole words; the 32 steps unroll to one level of XORs.
inline uint32_t crc32_words(const uint32_t* table, uint32_t first, uint32_t end) {
    FASTCAR_NO_INLINE
    uint32_t crc = 0xFFFFFFFFu;
    for (uint32_t i = first; i < end; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(1, 65536)
        crc ^= table[i];
        for (int bit = 0; bit < 32; ++bit) {
            FASTCAR_UNROLL
            crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0xEDB88320u : 0u);
        }
    }
    return ~crc;
}

inline bool within(uint32_t value, uint32_t least, uint32_t most) {
    FASTCAR_INLINE
    return value >= least && value <= most;
}

template <int CORES>
bool header_is_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t layers = header[F_LAYERS];
    const uint32_t stride = header[F_LAYER_WORDS];
    if (!within(layers, 1, MAX_LAYERS) || !within(stride, 1, MAX_LAYER_WORDS)) {
        return false;
    }
    const bool counts = within(header[F_ROWS], 1, INDEX_REGISTER_BITS) && within(header[F_CORES], 1, CORES) &&
                        header[F_TOKENS_PER_FRAME] != 0 && header[F_RESERVED] == 0;
    const bool offsets = header[F_THRESHOLDS] == HEADER_WORDS && header[F_INSTRUCTIONS] == HEADER_WORDS + layers;
    return counts && offsets && header[F_WORDS] == HEADER_WORDS + layers + layers * stride;
}

// Checks in the documented order; fills `header` when the table is long enough to have one.
template <int CORES>
Status check_table(const uint32_t* table, uint32_t table_bytes, uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    if (table_bytes < 4 * HEADER_WORDS) {
        return TOO_SHORT;
    }
    for (uint32_t i = 0; i < HEADER_WORDS; ++i) {
        FASTCAR_PIPELINE(1)
        header[i] = table[i];
    }
    if (header[F_MAGIC] != MAGIC) {
        return BAD_MAGIC;
    }
    if (header[F_VERSION] != VERSION) {
        return BAD_VERSION;
    }
    const uint32_t words = table_bytes / 4;
    if (table_bytes % 4 != 0 || header[F_WORDS] != words || words > MAX_TABLE_WORDS) {
        return BAD_LENGTH;
    }
    if (crc32_words(table, F_CRC + 1, words) != header[F_CRC]) {
        return BAD_CRC;
    }
    return header_is_valid<CORES>(header) ? OK : BAD_HEADER;
}

inline uint32_t opcode_of(uint32_t word) { return word >> 24; }
inline uint32_t row_of(uint32_t word) { return (word >> 16) & 0xFFu; }
inline uint32_t layer_of(uint32_t word) { return word & 0xFFFFu; }

inline bool word_is_valid(uint32_t word, uint32_t layer, uint32_t rows) {
    FASTCAR_INLINE
    const uint32_t opcode = opcode_of(word);
    const bool of_row = opcode == COMPUTE_MLP || opcode == REPLAY_COPY;
    const bool row_fits = of_row ? row_of(word) < rows : row_of(word) == NO_UNIT;
    return within(opcode, LOAD_WEIGHTS, END) && layer_of(word) == layer && row_fits;
}

// Copies one layer's words, from word `first` of the table up to END; returns how many, or -1 when one is not valid or END is missing.
inline int fetch_layer(const uint32_t* table, uint32_t first, uint32_t stride, uint32_t layer, uint32_t rows,
                       uint32_t program[MAX_LAYER_WORDS]) {
    FASTCAR_NO_INLINE
    for (uint32_t i = 0; i < stride; ++i) {
        FASTCAR_TRIPS(1, 128)
        const uint32_t word = table[first + i];
        if (!word_is_valid(word, layer, rows)) {
            return -1;
        }
        if (opcode_of(word) == END) {
            return static_cast<int>(i);
        }
        program[i] = word;
    }
    return -1;
}

inline bool is_issued(uint32_t word, uint32_t index_register, int computing) {
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
            return computing == 0;
        default:
            return true;
    }
}

// result[0] = status, result[1] = number of records, result[2..] = records (opcode << 24 | row << 16 | core << 8).
template <int CORES>
void control(const uint32_t* table, uint32_t table_bytes, uint32_t layer, uint32_t index_register, uint32_t capacity,
             uint32_t* result) {
    uint32_t header[HEADER_WORDS];
    uint32_t program[MAX_LAYER_WORDS];
    ap_uint<MappingBits<CORES>::VALUE> mapping[INDEX_REGISTER_BITS];
    FASTCAR_PARTITION(header, 0)
    uint32_t count = 0;
    int length = 0;
    Status status = check_table<CORES>(table, table_bytes, header);
    if (status == OK && layer >= header[F_LAYERS]) {
        status = BAD_LAYER;
    }
    if (status == OK) {
        const uint32_t first = header[F_INSTRUCTIONS] + layer * header[F_LAYER_WORDS];
        length = fetch_layer(table, first, header[F_LAYER_WORDS], layer, header[F_ROWS], program);
        status = length < 0 ? BAD_INSTRUCTION : OK;
    }
    if (status == OK) {
        const int rows = static_cast<int>(header[F_ROWS]);
        const int computing = map_rows<MappingBits<CORES>::VALUE>(index_register, rows,
                                                                  static_cast<int>(header[F_CORES]), mapping);
        for (int i = 0; i < length; ++i) {
            FASTCAR_TRIPS(1, 128)
            const uint32_t word = program[i];
            if (is_issued(word, index_register, computing)) {
                if (count == capacity) {
                    status = QUEUE_FULL;
                    break;
                }
                const uint32_t row = row_of(word);
                const uint32_t core = opcode_of(word) == COMPUTE_MLP ? mapping[row & 31u].to_uint() : NO_UNIT;
                result[2 + count] = (opcode_of(word) << 24) | (row << 16) | (core << 8);
                ++count;
            }
        }
    }
    result[0] = static_cast<uint32_t>(status);
    result[1] = count;
}

}  // namespace drs
}  // namespace fastcar

#endif
