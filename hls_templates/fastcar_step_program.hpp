// The program of a control table on chip: loaded once, behind the checks of the table (docs/reference/drs_table.md). Every loop is
// bounded, and an instruction that passes reads and writes inside of its buffers only.
#ifndef FASTCAR_STEP_PROGRAM_HPP
#define FASTCAR_STEP_PROGRAM_HPP

#include "fastcar_cache_core.hpp"
#include "fastcar_drs_table.hpp"

namespace fastcar {
namespace step {

static const int INSTRUCTION_WORDS = drs::PROGRAM_WORDS;
static const uint32_t INSTRUCTION_BEATS = INSTRUCTION_WORDS / FLOAT_LANES;
static const int GAINS = 16;
static const uint32_t GAIN_WORDS = 2 * GAINS / FLOAT_LANES;  // edges of a draft's gain and a zero, then its values

// Every opcode, and rows on chip.
struct WholeSteps {
    static const uint32_t OPCODES = 0xFFFFFFFFu;
    static const int PLACES = 5;
};

// Words 5 and 25 to 35 of the header.
struct Sizes {
    uint32_t rows;
    uint32_t ports;
    uint32_t positions;
    uint32_t row_words;
    uint32_t constant_words;
    uint32_t weight_words;
    uint32_t key_words;
    uint32_t value_words;
    uint32_t input_words;
    uint32_t output_words;
    uint32_t replay_words;
    uint32_t videos;
    uint32_t span_words;  // of the ranges of positions that a row sees, two to a word; the only row of a video has none
};

// INSTRUCTIONS: what the engine holds.
template <int INSTRUCTIONS>
struct Program {
    Sizes sizes;
    uint32_t count;
    word_t words[INSTRUCTIONS * INSTRUCTION_BEATS];
};

// One instruction's words, and those after its fields are zero.
struct Fields {
    uint32_t opcode;
    uint32_t layer;
    uint32_t word[INSTRUCTION_WORDS];
};

inline Fields fields_of(const word_t beats[INSTRUCTION_BEATS]) {
    FASTCAR_INLINE
    Fields fields;
    for (int i = 0; i < INSTRUCTION_WORDS; ++i) {
        fields.word[i] = lane_bits(beats[i / FLOAT_LANES], i % FLOAT_LANES);
    }
    fields.opcode = fields.word[0] & 0xFFFFu;
    fields.layer = fields.word[0] >> 16;
    return fields;
}

template <int INSTRUCTIONS>
Fields instruction_of(const Program<INSTRUCTIONS>& program, uint32_t number) {
    FASTCAR_INLINE
    word_t beats[INSTRUCTION_BEATS];
    FASTCAR_PARTITION(beats, 0)
copy_beats:
    for (uint32_t beat = 0; beat < INSTRUCTION_BEATS; ++beat) {
        FASTCAR_PIPELINE(1)
        beats[beat] = program.words[number * INSTRUCTION_BEATS + beat];
    }
    return fields_of(beats);
}

inline bool counts(uint32_t value) {
    FASTCAR_INLINE
    return value >= 1 && value <= drs::MAX_COUNT;
}

inline bool on_chip(uint32_t place) {
    FASTCAR_INLINE
    return place < ROWS_ON_CHIP;
}

inline bool moves_on_chip(uint32_t source, uint32_t target) {
    FASTCAR_INLINE
    return on_chip(source) && on_chip(target) && source != target;
}

// `count` times `words` words from `first` on lie within `room`; 64 bits hold every product of what was counted.
inline bool inside(uint64_t first, uint64_t count, uint64_t words, uint64_t room) {
    FASTCAR_INLINE
    return first + count * words <= room;
}

// Memory words of the list of rows at the beginning of the input: one of each row, then its ranges.
inline uint32_t row_list_words_of(const Sizes& sizes) {
    FASTCAR_INLINE
    return sizes.rows * (1 + sizes.span_words);
}

inline uint64_t key_words_of(const Sizes& sizes, uint32_t blocks) {
    FASTCAR_INLINE
    const uint32_t stride = sizes.ports * cache::KEY_ROWS;
    const uint64_t tiles = (sizes.positions + stride - 1) / stride;
    return tiles * blocks * (1 + cache::KEY_ROWS * cache::BLOCK_WORDS);
}

inline uint64_t value_words_of(const Sizes& sizes, uint32_t blocks) {
    FASTCAR_INLINE
    const uint64_t slots = (cache::BLOCK + sizes.ports - 1) / sizes.ports;
    const uint64_t head = (static_cast<uint64_t>(blocks) * cache::BLOCK_WORDS + sizes.ports - 1) / sizes.ports;
    const uint64_t tiles = (sizes.positions + cache::TILE - 1) / cache::TILE;
    return tiles * (head + blocks * slots * cache::BLOCK_WORDS);
}

inline bool ring_fits(uint64_t sinks, uint32_t ring, const Sizes& sizes) {
    FASTCAR_INLINE
    return ring >= 1 && sinks + ring <= sizes.positions;
}

inline bool norm_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    return moves_on_chip(f.word[NORM_SOURCE], f.word[NORM_TARGET]) &&
           counts(f.word[NORM_COUNT]) && counts(f.word[NORM_PIECES]) &&
           inside(f.word[NORM_FIRST], f.word[NORM_PIECES], f.word[NORM_COUNT], sizes.row_words) &&
           inside(f.word[NORM_WEIGHT], 1, f.word[NORM_COUNT], sizes.constant_words);
}

// Rows of a short program come from memory, behind the list of rows, and go there from word 0 on.
inline bool in_memory(uint32_t source, uint32_t target) {
    FASTCAR_INLINE
    return source == INPUT_ROWS && target == OUTPUT_ROWS;
}

inline bool linear_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint32_t channels = f.word[LINEAR_CHANNELS];
    const uint64_t words = (static_cast<uint64_t>(channels) + FLOAT_LANES - 1) / FLOAT_LANES;
    const uint64_t read = (f.word[LINEAR_INPUTS] + FLOAT_LANES - 1) / FLOAT_LANES;
    const bool leaves = f.word[LINEAR_TARGET] == OUTPUT_ROWS, comes = in_memory(f.word[LINEAR_SOURCE], f.word[LINEAR_TARGET]);
    const bool places = comes || (leaves && on_chip(f.word[LINEAR_SOURCE])) ||
                        moves_on_chip(f.word[LINEAR_SOURCE], f.word[LINEAR_TARGET]);
    const bool small = counts(f.word[LINEAR_INPUTS]) && counts(f.word[LINEAR_TILE]) && channels >= 1 &&
                       channels <= MAX_CHANNELS && f.word[LINEAR_TILES] >= 1 && f.word[LINEAR_TILES] <= channels;
    const uint64_t covered = static_cast<uint64_t>(f.word[LINEAR_TILE]) * f.word[LINEAR_TILES] * sizes.ports;
    return places && small && covered >= channels && f.word[LINEAR_BIAS] <= 1 &&
           f.word[LINEAR_WEIGHTS] < sizes.weight_words &&
           (comes ? inside(row_list_words_of(sizes), sizes.rows, read, sizes.input_words) : read <= sizes.row_words) &&
           (leaves ? inside(0, sizes.rows, words, sizes.output_words) : words <= sizes.row_words);
}

inline bool rotate_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint64_t half = f.word[ROTATE_HALF_WORDS];
    return moves_on_chip(f.word[ROTATE_SOURCE], f.word[ROTATE_TARGET]) && counts(f.word[ROTATE_HEADS]) &&
           counts(f.word[ROTATE_HEAD_WORDS]) && counts(f.word[ROTATE_HALF_WORDS]) && 2 * half <= f.word[ROTATE_HEAD_WORDS] &&
           inside(f.word[ROTATE_FIRST], f.word[ROTATE_HEADS], f.word[ROTATE_HEAD_WORDS], sizes.row_words) &&
           f.word[ROTATE_TABLE_ROWS] >= 1 && f.word[ROTATE_TABLE_ROWS] <= MAX_WORDS &&
           inside(f.word[ROTATE_TABLE], f.word[ROTATE_TABLE_ROWS], 2 * half, sizes.constant_words);
}

// Keys and values have the same fields.
inline bool append_fits(const Fields& f, const Sizes& sizes, uint64_t head_words, uint32_t section) {
    FASTCAR_INLINE
    const uint64_t heads = f.word[APPEND_KEYS_HEADS];
    return on_chip(f.word[APPEND_KEYS_SOURCE]) && counts(f.word[APPEND_KEYS_HEADS]) && counts(f.word[APPEND_KEYS_BLOCKS]) &&
           inside(f.word[APPEND_KEYS_FIRST], heads * f.word[APPEND_KEYS_BLOCKS], cache::BLOCK_FLOAT_WORDS, sizes.row_words) &&
           ring_fits(f.word[APPEND_KEYS_SINKS], f.word[APPEND_KEYS_RING], sizes) &&
           inside(f.word[APPEND_KEYS_CACHE], sizes.videos * heads, head_words, section);
}

inline bool attend_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint32_t key_heads = f.word[ATTEND_KEY_HEADS];
    const uint32_t blocks = f.word[ATTEND_BLOCKS];
    const uint64_t heads = f.word[ATTEND_HEADS];
    const bool small = moves_on_chip(f.word[ATTEND_SOURCE], f.word[ATTEND_TARGET]) && counts(f.word[ATTEND_HEADS]) &&
                       counts(key_heads) && counts(blocks);
    const uint64_t cached = static_cast<uint64_t>(sizes.videos) * key_heads;
    return small && heads % (small ? key_heads : 1u) == 0 && f.word[ATTEND_WINDOW] >= 1 &&
           ring_fits(f.word[ATTEND_SINKS], f.word[ATTEND_RING], sizes) &&
           inside(0, heads * blocks, cache::BLOCK_FLOAT_WORDS, sizes.row_words) &&
           inside(f.word[ATTEND_KEYS], cached, key_words_of(sizes, blocks), sizes.key_words) &&
           inside(f.word[ATTEND_VALUES], cached, value_words_of(sizes, blocks), sizes.value_words);
}

// Memory words of a network of gate `learned`.
inline uint64_t network_words_of(uint64_t units, uint32_t count) {
    FASTCAR_INLINE
    return 1 + units * (1 + 2 * ((count + 1) / 2));
}

inline bool gate_query_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint32_t key_heads = f.word[DECIDE_KEY_HEADS];
    const uint32_t blocks = f.word[DECIDE_BLOCKS];
    const uint64_t heads = f.word[DECIDE_HEADS];
    const bool small = counts(f.word[DECIDE_HEADS]) && counts(key_heads) && counts(blocks);
    return small && heads % (small ? key_heads : 1u) == 0 && ring_fits(f.word[DECIDE_SINKS], f.word[DECIDE_RING], sizes) &&
           inside(0, heads * blocks, cache::BLOCK_FLOAT_WORDS, sizes.row_words) &&
           inside(f.word[DECIDE_KEYS], static_cast<uint64_t>(sizes.videos) * key_heads, key_words_of(sizes, blocks),
                  sizes.key_words);
}

inline bool gate_input_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint64_t slots = f.word[DECIDE_STRIDE];
    return counts(f.word[DECIDE_COUNT]) && f.word[DECIDE_COUNT] <= sizes.row_words &&
           inside(f.word[DECIDE_INPUTS], slots * sizes.videos, f.word[DECIDE_COUNT], sizes.replay_words);
}

// Fields of what the gate does not read are 0.
inline bool decide_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint32_t gate = f.word[DECIDE_GATE];
    const bool counted = gate >= drs::GATE_TAS && gate <= drs::GATE_LEARNED && counts(f.word[DECIDE_STRIDE]) && on_chip(f.word[DECIDE_SOURCE]) &&
                         inside(f.word[DECIDE_CHAIN], f.word[DECIDE_STRIDE], sizes.videos, sizes.replay_words);
    const bool no_query = (f.word[DECIDE_HEADS] | f.word[DECIDE_KEY_HEADS] | f.word[DECIDE_BLOCKS] |
                           f.word[DECIDE_KEYS] | f.word[DECIDE_SINKS] | f.word[DECIDE_RING]) == 0;
    const bool no_input = (f.word[DECIDE_COUNT] | f.word[DECIDE_INPUTS]) == 0;
    const bool no_network = (f.word[DECIDE_NETWORK] | f.word[DECIDE_UNITS]) == 0;
    const bool network = f.word[DECIDE_UNITS] >= 1 && f.word[DECIDE_UNITS] <= drs::MAX_UNITS &&
                         inside(f.word[DECIDE_NETWORK], 1, network_words_of(f.word[DECIDE_UNITS], f.word[DECIDE_COUNT]),
                                sizes.constant_words);
    return counted && (drs::reads_query(gate) ? gate_query_fits(f, sizes) && no_input : no_query && gate_input_fits(f, sizes)) &&
           (gate == drs::GATE_LEARNED ? network : no_network);
}

inline bool replay_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint64_t slots = f.word[REPLAY_SLOTS];
    return moves_on_chip(f.word[REPLAY_SOURCE], f.word[REPLAY_TARGET]) && counts(f.word[REPLAY_COUNT]) &&
           counts(f.word[REPLAY_SLOTS]) && f.word[REPLAY_COUNT] <= sizes.row_words &&
           inside(f.word[REPLAY_CACHE], slots * sizes.videos, f.word[REPLAY_COUNT], sizes.replay_words);
}

inline bool recall_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint64_t slots = f.word[RECALL_SLOTS];
    return moves_on_chip(f.word[RECALL_SOURCE], f.word[RECALL_TARGET]) && counts(f.word[RECALL_COUNT]) &&
           counts(f.word[RECALL_SLOTS]) && f.word[RECALL_COUNT] <= sizes.row_words &&
           inside(f.word[RECALL_INPUTS], slots * sizes.videos, f.word[RECALL_COUNT], sizes.replay_words) &&
           inside(f.word[RECALL_TABLE], 1, GAIN_WORDS, sizes.constant_words);
}

// Its sizes are those of the engine, which has its own checks (fastcar_step_control.hpp).
inline bool draft_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    return moves_on_chip(f.word[DRAFT_SOURCE], f.word[DRAFT_RECALLED]) && moves_on_chip(f.word[DRAFT_SOURCE], f.word[DRAFT_TARGET]) &&
           f.word[DRAFT_RECALLED] != f.word[DRAFT_TARGET] && counts(f.word[DRAFT_NEURONS]) && counts(f.word[DRAFT_RANK]) &&
           counts(f.word[DRAFT_NEURONS] + f.word[DRAFT_RANK]) && counts(f.word[DRAFT_TILE]) && counts(f.word[DRAFT_TILES]) &&
           counts(f.word[DRAFT_OUTER_TILE]) && counts(f.word[DRAFT_OUTER_TILES]) && f.word[DRAFT_BIAS] <= 1 &&
           f.word[DRAFT_WEIGHTS] < sizes.weight_words;
}

inline bool rest_is_zero(const Fields& f, int used) {
    FASTCAR_INLINE
    uint32_t any = 0;
    for (int i = 0; i < INSTRUCTION_WORDS; ++i) {
        any |= i >= used ? f.word[i] : 0u;
    }
    return any == 0;
}

// q or x, then the key or the kept x, behind the list of rows.
inline bool decide_rows_fit(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint32_t units = f.word[DECIDE_ROWS_UNITS];
    const uint64_t query = f.word[DECIDE_ROWS_QUERY_WORDS], count = f.word[DECIDE_ROWS_COUNT];
    const bool network = units <= drs::MAX_UNITS && counts(f.word[DECIDE_ROWS_COUNT]) && query == sizes.rows * count &&
                         inside(f.word[DECIDE_ROWS_NETWORK], 1, network_words_of(units, f.word[DECIDE_ROWS_COUNT]),
                                sizes.constant_words);
    return inside(row_list_words_of(sizes) + query, 1, f.word[DECIDE_ROWS_KEY_WORDS], sizes.input_words) &&
           (units == 0 ? (f.word[DECIDE_ROWS_NETWORK] | f.word[DECIDE_ROWS_COUNT]) == 0 : network);
}

// Whether the kernel has an opcode: what it has not folds away.
template <class D>
bool has(uint32_t opcode) {
    FASTCAR_INLINE
    return ((D::OPCODES >> opcode) & 1u) != 0;
}

// Whether an instruction is known, its fields are in range, and it stays inside of its buffers.
template <class D>
bool instruction_fits(const Fields& f, const Sizes& sizes) {
    FASTCAR_NO_INLINE
    if (f.opcode > OP_STORE || !has<D>(f.opcode)) {
        return false;
    }
    switch (f.opcode) {
        case OP_LOAD:
            return rest_is_zero(f, LOAD_WORDS) && on_chip(f.word[LOAD_TARGET]) && counts(f.word[LOAD_COUNT]) &&
                   f.word[LOAD_COUNT] <= sizes.row_words && inside(row_list_words_of(sizes), sizes.rows, f.word[LOAD_COUNT], sizes.input_words);
        case OP_NORM:
            return rest_is_zero(f, NORM_WORDS) && norm_fits(f, sizes);
        case OP_LINEAR:
            return rest_is_zero(f, LINEAR_WORDS) && linear_fits(f, sizes);
        case OP_MLP:
            return rest_is_zero(f, MLP_WORDS) && f.word[MLP_WEIGHTS] < sizes.weight_words &&
                   (in_memory(f.word[MLP_SOURCE], f.word[MLP_TARGET]) || moves_on_chip(f.word[MLP_SOURCE], f.word[MLP_TARGET]));
        case OP_ROTATE:
            return rest_is_zero(f, ROTATE_WORDS) && rotate_fits(f, sizes);
        case OP_APPEND_KEYS:
            return rest_is_zero(f, APPEND_KEYS_WORDS) &&
                   append_fits(f, sizes, key_words_of(sizes, f.word[APPEND_KEYS_BLOCKS]), sizes.key_words);
        case OP_APPEND_VALUES:
            return rest_is_zero(f, APPEND_VALUES_WORDS) &&
                   append_fits(f, sizes, value_words_of(sizes, f.word[APPEND_VALUES_BLOCKS]), sizes.value_words);
        case OP_ATTEND:
            return rest_is_zero(f, ATTEND_WORDS) && attend_fits(f, sizes);
        case OP_ADD:
            return rest_is_zero(f, ADD_WORDS) && moves_on_chip(f.word[ADD_SOURCE], f.word[ADD_TARGET]) &&
                   counts(f.word[ADD_COUNT]) && f.word[ADD_COUNT] <= sizes.row_words;
        case OP_DECIDE:
            return rest_is_zero(f, DECIDE_WORDS) && decide_fits(f, sizes);
        case OP_DECIDE_ROWS:
            return rest_is_zero(f, DECIDE_ROWS_WORDS) && decide_rows_fit(f, sizes);
        case OP_REPLAY:
            return rest_is_zero(f, REPLAY_WORDS) && replay_fits(f, sizes);
        case OP_RECALL:
            return rest_is_zero(f, RECALL_WORDS) && recall_fits(f, sizes);
        case OP_DRAFT:
            return rest_is_zero(f, DRAFT_WORDS) && draft_fits(f, sizes);
        case OP_REPLAY_DRAFT:
            return rest_is_zero(f, REPLAY_DRAFT_WORDS) && replay_fits(f, sizes) &&
                   inside(f.word[REPLAY_DRAFT_BIAS], 1, f.word[REPLAY_DRAFT_COUNT], sizes.constant_words);
        case OP_LAYER_NORM:
            return rest_is_zero(f, LAYER_NORM_WORDS) && norm_fits(f, sizes) &&
                   inside(f.word[LAYER_NORM_WEIGHT], 2, f.word[LAYER_NORM_COUNT], sizes.constant_words);
        case OP_STORE:
            return rest_is_zero(f, STORE_WORDS) && on_chip(f.word[STORE_SOURCE]) && counts(f.word[STORE_COUNT]) &&
                   f.word[STORE_COUNT] <= sizes.row_words && inside(0, sizes.rows, f.word[STORE_COUNT], sizes.output_words);
        case OP_END:
            return rest_is_zero(f, END_WORDS);
        default:
            return false;
    }
}

inline bool sizes_are_valid(const Sizes& sizes) {
    FASTCAR_INLINE
    return sizes.rows >= 1 && sizes.rows <= drs::MAX_ROWS && sizes.rows % sizes.videos == 0 && sizes.ports >= 1 &&
           sizes.ports <= MAX_PORTS &&
           counts(sizes.row_words) && counts(sizes.positions) && sizes.constant_words <= MAX_WORDS &&
           sizes.weight_words <= MAX_WORDS && sizes.key_words <= MAX_WORDS && sizes.value_words <= MAX_WORDS &&
           sizes.input_words <= MAX_WORDS && sizes.output_words <= MAX_WORDS && sizes.replay_words <= MAX_WORDS;
}

// Copies the instructions and checks each; the last one is END. Others end the launches that begin before them.
template <int INSTRUCTIONS, class D>
bool load_instructions(const word_t* memory, uint32_t first, Program<INSTRUCTIONS>& program) {
    FASTCAR_NO_INLINE
    bool good = true;
load_instruction:
    for (uint32_t i = 0; i < program.count; ++i) {
        FASTCAR_TRIPS(1, INSTRUCTIONS)
        word_t beats[INSTRUCTION_BEATS];
        FASTCAR_PARTITION(beats, 0)
    load_beats:
        for (uint32_t beat = 0; beat < INSTRUCTION_BEATS; ++beat) {
            FASTCAR_PIPELINE(1)
            beats[beat] = memory[first + i * INSTRUCTION_BEATS + beat];
            program.words[i * INSTRUCTION_BEATS + beat] = beats[beat];
        }
        const Fields fields = fields_of(beats);
        const bool last = i + 1 == program.count;
        good = good && instruction_fits<D>(fields, program.sizes) && (fields.opcode == OP_END || !last);
    }
    return good;
}

// Loads the program of a table whose header is checked. With a status other than OK there is no program (count 0).
template <int INSTRUCTIONS, class D = WholeSteps>
uint32_t load(const word_t* memory, const uint32_t header[drs::HEADER_WORDS], Program<INSTRUCTIONS>& program) {
    FASTCAR_NO_INLINE
    const uint32_t videos = header[drs::F_VIDEOS], own = header[drs::F_ROWS] / (videos != 0 ? videos : 1u);
    const Sizes sizes = {header[drs::F_ROWS],           header[drs::F_PORTS],           header[drs::F_POSITIONS],
                         header[drs::F_ROW_WORDS],      header[drs::F_CONSTANT_WORDS],  header[drs::F_WEIGHT_WORDS],
                         header[drs::F_CACHED_KEY_WORDS], header[drs::F_CACHED_VALUE_WORDS], header[drs::F_READ_WORDS],
                         header[drs::F_WRITTEN_WORDS],   header[drs::F_REPLAY_WORDS],
                         videos,                        own > 1 ? (own + 1) / 2 : 0};
    const uint32_t count = header[drs::F_INSTRUCTIONS];
    program.sizes = sizes;
    program.count = 0;
    if (count == 0) {
        return drs::OK;
    }
    if (videos == 0 || !sizes_are_valid(sizes)) {
        return drs::BAD_HEADER;
    }
    program.count = count;
    const uint32_t first = (header[drs::F_WORDS] - count * INSTRUCTION_WORDS) / FLOAT_LANES;
    const bool good = load_instructions<INSTRUCTIONS, D>(memory, first, program);
    program.count = good ? count : 0;
    return good ? drs::OK : drs::BAD_INSTRUCTION;
}

}  // namespace step
}  // namespace fastcar

#endif
