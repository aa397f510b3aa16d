// Instructions on rows that stay on chip. Plain functions, no streams: they run one after another, because all of them
// together take one percent of a step. Every place is a memory: x, a and y.
#pragma once

#include "fastcar_gate_core.hpp"
#include "fastcar_row_core.hpp"
#include "fastcar_step_control.hpp"

namespace fastcar {
namespace step {

template <class D>
void load_input(const Fields& f, uint32_t count, uint32_t first, const word_t* input, word_t x[D::ROWS][D::X_WORDS]) {
    FASTCAR_NO_INLINE
    const uint32_t words = f.word[LOAD_COUNT];
load_each_row:
    for (uint32_t b = 0; b < count; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
    load_words:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(1, D::X_WORDS)
            x[b][i] = input[first + b * words + i];
        }
    }
}

// The opposite: rows that are there, from word 0 of the output on.
template <class D>
void store_output(const Fields& f, uint32_t count, uint32_t active, const word_t a[D::ROWS][D::A_WORDS], word_t* output) {
    FASTCAR_NO_INLINE
store_each_row:
    for (uint32_t b = 0; b < count; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const uint32_t words = row_computes(active, b) ? f.word[STORE_COUNT] : 0;
    store_words:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::A_WORDS)
            output[b * f.word[STORE_COUNT] + i] = a[b][i];
        }
    }
}

// The weight is read once for all rows and pieces, in the first pass over the first of them. Behind a decision, only the MLP reads
// what a norm gives, and of rows that compute: others keep what they are. A layer norm is the norm of what the mean leaves, which
// waits in its target; its bias is read for every row and piece.
template <class D>
void norm_rows(const Fields& f, uint32_t count, uint32_t computing, const word_t* constants, const word_t x[D::ROWS][D::X_WORDS],
               word_t a[D::ROWS][D::A_WORDS], word_t y[D::ROWS][D::Y_WORDS]) {
    FASTCAR_NO_INLINE
    word_t weight[D::NORM_WORDS];
    FASTCAR_BLOCK_RAM(weight)
    static_assert(static_cast<int>(NORM_EPSILON) == LAYER_NORM_EPSILON, "LAYER_NORM has the fields of NORM");
    const bool centered = has<D>(OP_LAYER_NORM) && f.opcode == OP_LAYER_NORM, heads = f.word[NORM_SOURCE] == Y_ROWS;
    const float inverse_size = float_of_bits(f.word[NORM_INVERSE_SIZE]);
    const uint32_t words = f.word[NORM_COUNT];
    const uint32_t biases = centered ? words : 0;
    uint32_t given = words;
norm_each_row:
    for (uint32_t b = 0; b < count; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const uint32_t pieces = ((computing >> b) & 1u) != 0 ? f.word[NORM_PIECES] : 0;
        uint32_t first = f.word[NORM_FIRST];
    norm_pieces:
        for (uint32_t piece = 0; piece < pieces; ++piece) {
            FASTCAR_TRIPS(0, D::Y_WORDS)
            if (centered) norm::center<D::X_WORDS, D::A_WORDS, D::Y_WORDS>(x[b], heads, first, words, inverse_size, a[b], y[b]);
            norm::normalize<D::X_WORDS, D::A_WORDS, D::Y_WORDS, D::NORM_WORDS>(x[b], heads, centered, first, words, constants, f.word[NORM_WEIGHT], given,
                                                                 inverse_size, float_of_bits(f.word[NORM_EPSILON]), weight, a[b], y[b]);
        add_bias:
            for (uint32_t i = 0; i < biases; ++i) {
                FASTCAR_PIPELINE(1)
                FASTCAR_TRIPS(0, D::X_WORDS)
                FASTCAR_INDEPENDENT(a)
                FASTCAR_INDEPENDENT(y)
                const word_t own = heads ? y[b][first + i] : a[b][first + i];
                const word_t sum = row::add_step(own, constants[f.word[NORM_WEIGHT] + words + i]);
                if (heads) y[b][first + i] = sum;
                if (!heads) a[b][first + i] = sum;
            }
            given = 0;
            first += words;
        }
    }
}

// Every row by the table's row of its position.
template <class D>
void rotate_rows(const Fields& f, uint32_t count, const Rows<D>& list, const word_t* constants, word_t y[D::ROWS][D::Y_WORDS]) {
    FASTCAR_NO_INLINE
    static const int HALF = D::BLOCKS * cache::BLOCK_FLOAT_WORDS / 2;
    word_t cosine[HALF];
    word_t sine[HALF];
    const uint32_t half = f.word[ROTATE_HALF_WORDS];
    const uint32_t last = f.word[ROTATE_TABLE_ROWS] - 1;
    const row::Rotation shape = {f.word[ROTATE_FIRST], f.word[ROTATE_HEADS] * half, f.word[ROTATE_HEAD_WORDS], half};
rotate_each_row:
    for (uint32_t b = 0; b < count; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const uint32_t position = list.position[b], words = row_computes(list.active, b) ? half : 0;
        const uint32_t table = f.word[ROTATE_TABLE] + 2 * half * (position < last ? position : last);
    read_cosines:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, HALF)
            cosine[i] = constants[table + i];
        }
    read_sines:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, HALF)
            sine[i] = constants[table + half + i];
        }
        if (words > 0) row::rotate_row<D::Y_WORDS, HALF>(cosine, sine, shape, y[b]);
    }
}

// y is added to x. Of an MLP that may replay (its slots are in `replay`), a row of a decode forward that computed
// is also kept in its slot, or will be, and of any other, what the slot holds is added; or its draft, and what the gain leaves of the slot.
template <class D>
void add_rows(const Fields& f, const Sizes& sizes, uint32_t computing, uint32_t committed, const Rows<D>& list, const word_t* constants,
              const float gain[INDEX_REGISTER_BITS], word_t* replay, word_t x[D::ROWS][D::X_WORDS], word_t y[D::ROWS][D::Y_WORDS]) {
    FASTCAR_NO_INLINE
    static_assert(static_cast<int>(ADD_COUNT) == REPLAY_COUNT, "ADD is REPLAY without slots");
    static_assert(static_cast<int>(REPLAY_CACHE) == REPLAY_DRAFT_CACHE, "REPLAY_DRAFT is REPLAY with a draft's bias behind it");
    const bool drafted = has<D>(OP_REPLAY_DRAFT) && f.opcode == OP_REPLAY_DRAFT;
    const uint32_t bias = f.word[REPLAY_DRAFT_BIAS];
    const bool replays = f.opcode == OP_REPLAY || drafted;
    const uint32_t keeping = replays ? list.deciding : 0;
    const uint32_t words = f.word[REPLAY_COUNT];
    if (replays) commit_rows<D>(list, sizes, f.word[REPLAY_SLOTS], f.word[REPLAY_CACHE], words, committed, replay);
add_each_row:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const bool computes = row_computes(computing, b), kept = row_computes(keeping, b);
        const uint32_t slot = kept ? slot_of<D>(list, sizes, f.word[REPLAY_SLOTS], b) : 0, first = f.word[REPLAY_CACHE] + slot * words;
        const uint32_t written = kept ? f.word[REPLAY_CACHE] + written_of<D>(list, sizes, f.word[REPLAY_SLOTS], b) * words : 0;
        const uint32_t stored = kept && computes ? words : 0;
        const uint32_t replayed = kept && !computes ? words : 0;
        const uint32_t summed = drafted ? replayed : 0;
        const uint32_t read = drafted ? 0 : replayed;
    keep_words:
        for (uint32_t i = 0; i < stored; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::X_WORDS)
            replay[written + i] = y[b][i];
        }
    replay_words:
        for (uint32_t i = 0; i < read; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::X_WORDS)
            y[b][i] = replay[first + i];
        }
    draft_words:
        for (uint32_t i = 0; i < summed; ++i) {
            FASTCAR_PIPELINE(4)
            FASTCAR_TRIPS(0, D::X_WORDS)
            FASTCAR_INDEPENDENT(y)
            y[b][i] = row::draft_step(constants[bias + i], replay[first + i], y[b][i], gain[b]);
        }
        row::add_row<D::X_WORDS, D::Y_WORDS>(y[b], words, x[b]);
    }
}

// The gain of a change: of as many gains as edges are at most the change; 0 where the change is not a number.
inline float gain_of(float change, const float table[2 * GAINS]) {
    FASTCAR_NO_INLINE
    float found = table[GAINS];
find_gain:
    for (uint32_t i = 1; i < GAINS; ++i) {
        FASTCAR_PIPELINE(1)
        found = change >= table[i - 1] ? table[GAINS + i] : found;
    }
    return change == change ? found : 0.0f;
}

// The x that the slots of the rows that replay keep, and the gains of their drafts.
template <class D>
void recall_rows(const Fields& f, const Sizes& sizes, uint32_t replaying, const Rows<D>& list, const word_t* constants,
                 const word_t* replay, float gain[INDEX_REGISTER_BITS], word_t a[D::ROWS][D::A_WORDS]) {
    FASTCAR_NO_INLINE
    float table[2 * GAINS];  // edges, then gains
    FASTCAR_PARTITION_CYCLIC(table, 1, 4)
    const uint32_t given = replaying != 0 ? GAIN_WORDS : 0, count = f.word[RECALL_COUNT];
read_gains:
    for (uint32_t i = 0; i < given; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, GAIN_WORDS)
        const word_t word = constants[f.word[RECALL_TABLE] + i];
        for (int lane = 0; lane < FLOAT_LANES; ++lane) {
            table[i * FLOAT_LANES + lane] = unpack_float(word, lane);
        }
    }
recall_each_row:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const uint32_t words = row_computes(replaying, b) ? count : 0;
        const uint32_t first = f.word[RECALL_INPUTS] + slot_of<D>(list, sizes, f.word[RECALL_SLOTS], b) * count;
        gate::Change sum = {0, 0, 0};
    recall_words:
        for (uint32_t i = 0; i < words; ++i) {
            FASTCAR_PIPELINE(4)
            FASTCAR_TRIPS(0, D::X_WORDS)
            const word_t kept = replay[first + i];
            a[b][count + i] = kept;
            sum = gate::change_step(sum, a[b][i], kept);
        }
        if (words > 0) gain[b] = gain_of(gate::change_score(sum), table);
    }
}

// The head from word `first` of a row on, as mantissas and exponents of the cache.
template <class D>
void quantize_row(const word_t y[D::Y_WORDS], uint32_t first, uint32_t blocks, int8_t mantissas[D::BLOCKS * cache::BLOCK], int8_t exponents[D::BLOCKS]) {
    FASTCAR_NO_INLINE
    static const int WORDS = D::BLOCKS * cache::BLOCK_FLOAT_WORDS;
    word_t head[WORDS];
    const uint32_t words = blocks * cache::BLOCK_FLOAT_WORDS;
copy_head:
    for (uint32_t i = 0; i < words; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(8, WORDS)
        head[i] = y[first + i];
    }
    cache::quantize_head<WORDS, D::BLOCKS>(head, 0, words, mantissas, exponents);
}

// ---- DECIDE: the TAS unit and the controller of a step, between rows on chip and the replay buffer

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
