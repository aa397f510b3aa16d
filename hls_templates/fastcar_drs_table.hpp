// The DRS control table: its checks, in the documented order (docs/reference/drs_table.md). Every loop is bounded.
#ifndef FASTCAR_DRS_TABLE_HPP
#define FASTCAR_DRS_TABLE_HPP

#include <stdint.h>

#include "fastcar_mapping.hpp"

namespace fastcar {
namespace drs {

static const uint32_t MAGIC = 0x53524446u;  // "FDRS"
static const uint32_t VERSION = 2;
static const uint32_t HEADER_WORDS = 20;
static const uint32_t MAX_TABLE_WORDS = 65536;
static const uint32_t MAX_LAYER_WORDS = 128;
static const uint32_t MAX_LAYERS = 65535;
static const uint32_t MAX_COUNT = 65535;
static const uint32_t MAX_PRODUCTS = 65536;
static const uint32_t MAX_CHAIN = 0x7FFFFFFFu;
static const uint32_t UNLIMITED = 0xFFFFFFFFu;
static const uint32_t GATE_TAS = 1;
static const uint32_t COUPLE_CFG = 1;
static const uint32_t FLOATS_PER_WORD = 4;
static const uint32_t NO_UNIT = 0xFFu;
static const uint32_t NO_LAYER = 0xFFFFFFFFu;

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
    F_GATE,
    F_FLAGS,
    F_MAX_CHAIN,
    F_HEADS,
    F_KV_HEADS,
    F_HEAD_DIM,
    F_THRESHOLDS,
    F_FACTORS,
    F_PREFETCH,
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
    BAD_OPERANDS,
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

inline uint32_t head_words_of(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_INLINE
    return (header[F_HEAD_DIM] + FLOATS_PER_WORD - 1) / FLOATS_PER_WORD;
}

inline bool attention_is_valid(const uint32_t header[HEADER_WORDS], uint32_t most_key_words) {
    FASTCAR_NO_INLINE
    const uint32_t heads = header[F_HEADS];
    const uint32_t kv_heads = header[F_KV_HEADS];
    const uint32_t dim = header[F_HEAD_DIM];
    if (!within(heads, 1, MAX_COUNT) || !within(kv_heads, 1, MAX_COUNT) || !within(dim, 1, MAX_COUNT)) {
        return false;
    }
    return heads % kv_heads == 0 && heads * dim <= MAX_PRODUCTS && kv_heads * head_words_of(header) <= most_key_words;
}

inline bool gate_is_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t flags = header[F_FLAGS];
    const uint32_t chain = header[F_MAX_CHAIN];
    const bool pairs = flags == 0 || (flags == COUPLE_CFG && header[F_ROWS] % 2 == 0);
    return header[F_GATE] == GATE_TAS && pairs && (within(chain, 1, MAX_CHAIN) || chain == UNLIMITED);
}

template <int CORES>
bool counts_are_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    return within(header[F_LAYERS], 1, MAX_LAYERS) && within(header[F_LAYER_WORDS], 1, MAX_LAYER_WORDS) &&
           within(header[F_ROWS], 1, INDEX_REGISTER_BITS) && within(header[F_CORES], 1, CORES) &&
           header[F_TOKENS_PER_FRAME] != 0 && header[F_RESERVED] == 0;
}

// Call after counts_are_valid: then nothing here overflows.
inline bool offsets_are_valid(const uint32_t header[HEADER_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t layers = header[F_LAYERS];
    const uint32_t first = HEADER_WORDS + 3 * layers;
    return header[F_THRESHOLDS] == HEADER_WORDS && header[F_FACTORS] == HEADER_WORDS + layers &&
           header[F_PREFETCH] == HEADER_WORDS + 2 * layers && header[F_INSTRUCTIONS] == first &&
           header[F_WORDS] == first + layers * header[F_LAYER_WORDS];
}

// Fills `header` when the table is long enough to have one. C: CORES and KEY_WORDS of this controller.
template <class C>
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
    const bool valid = counts_are_valid<C::CORES>(header) && gate_is_valid(header) &&
                       attention_is_valid(header, C::KEY_WORDS) && offsets_are_valid(header);
    return valid ? OK : BAD_HEADER;
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

// Copies one layer's words, from word `first` of the table up to END; returns how many, or -1 when one is not valid or
// END is missing.
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

}  // namespace drs
}  // namespace fastcar

#endif
