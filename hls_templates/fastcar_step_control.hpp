// What the kernel of whole steps keeps, what it can execute, and what it answers (docs/reference/accelerator.md).
#pragma once

#include "fastcar_attention_core.hpp"
#include "fastcar_drs.hpp"
#include "fastcar_engine_core.hpp"
#include "fastcar_step_program.hpp"

namespace fastcar {
namespace step {

static const uint32_t ANSWER_BEATS = drs::ANSWER_WORDS / FLOAT_LANES;  // of a layer in the report

// One launch, as the host gives it.
struct Launch {
    uint32_t op;
    uint32_t bytes;
    uint32_t entry;  // number of the first instruction
};

// The rows of a launch, from the beginning of the input. Bit b of a mask is row b. A row sees the positions up to its own.
template <class D>
struct Rows {
    uint32_t position[D::ROWS];
    uint32_t step[D::ROWS];
    uint32_t video[D::ROWS];
    uint32_t before[D::ROWS];  // of short programs: the replays in a row so far; else what is committed: 1 + the row's `step` in the last launch, 0: nothing
    uint32_t active;    // those that are there
    uint32_t deciding;  // of them, those of a decode forward; others are of a prompt: nothing is decided, replayed or kept
    uint32_t computes;  // those that no decision lets replay
};

// ---- what the kernel holds

inline bool in_section(uint64_t first, const Product& product, const Sizes& sizes) {
    FASTCAR_INLINE
    return first + static_cast<uint64_t>(product_words(product)) <= sizes.weight_words;
}

template <class C, class D>
bool linear_held(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const bool bias = f.word[LINEAR_BIAS] != 0;
    const int inputs = static_cast<int>(f.word[LINEAR_INPUTS]), channels = static_cast<int>(f.word[LINEAR_CHANNELS]);
    const int tile = static_cast<int>(f.word[LINEAR_TILE]), tiles = static_cast<int>(f.word[LINEAR_TILES]);
    const bool fits = fastcar::linear_fits<C>(inputs, channels, tile, tiles, bias);
    const Product product =
        make_product<typename Shapes<C>::Format>(inputs, channels, fits ? tile : 1, fits ? tiles : 1, false, bias);
    return D::WHOLE == (f.word[LINEAR_SOURCE] == A_ROWS) && fits && in_section(f.word[LINEAR_WEIGHTS], product, sizes);
}

template <class C, class D>
bool mlp_held(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint64_t row = words_for(C::HIDDEN, FLOAT_LANES);
    const bool memory = inside(sizes.rows, sizes.rows, row, sizes.input_words) && inside(0, sizes.rows, row, sizes.output_words);
    const uint64_t second = static_cast<uint64_t>(f.word[MLP_WEIGHTS]) + product_words(first_product<C>());
    return D::WHOLE == (f.word[MLP_SOURCE] == A_ROWS) && (D::WHOLE ? row <= sizes.x_words : memory) &&
           in_section(second, last_product<C>(OP_MLP, 0, 0, 0, 0), sizes);
}

template <class C, class D>
bool draft_held(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const int neurons = static_cast<int>(f.word[DRAFT_NEURONS]), rank = static_cast<int>(f.word[DRAFT_RANK]);
    const int tile = static_cast<int>(f.word[DRAFT_TILE]), tiles = static_cast<int>(f.word[DRAFT_TILES]);
    const int outer_tile = static_cast<int>(f.word[DRAFT_OUTER_TILE]), outer_tiles = static_cast<int>(f.word[DRAFT_OUTER_TILES]);
    const bool bias = f.word[DRAFT_BIAS] != 0;
    const bool fits = fastcar::draft_fits<C>(neurons, rank, tile, tiles, bias, outer_tile, outer_tiles);
    const Call call = decode_draft<C>(fits ? 1u : 0u, neurons, rank, tile, tiles, bias, outer_tile, outer_tiles);
    return fits && 2 * words_for(C::HIDDEN, FLOAT_LANES) <= static_cast<int>(sizes.a_words) &&
           static_cast<uint64_t>(f.word[DRAFT_WEIGHTS]) + static_cast<uint64_t>(call.words) <= sizes.weight_words;
}

// The controller is built for one gate.
template <class D, class T>
bool decide_held(const Fields& f, const Sizes& sizes) {
    FASTCAR_INLINE
    const uint64_t head = static_cast<uint64_t>(f.word[DECIDE_BLOCKS]) * cache::BLOCK_FLOAT_WORDS;
    return f.word[DECIDE_GATE] == T::GATE && sizes.rows <= T::ROWS && f.word[DECIDE_BLOCKS] <= D::BLOCKS &&
           inside(0, f.word[DECIDE_HEADS], head, T::QUERY_WORDS) && inside(0, f.word[DECIDE_KEY_HEADS], head, T::KEY_WORDS) &&
           f.word[DECIDE_COUNT] <= T::QUERY_WORDS && f.word[DECIDE_COUNT] <= T::KEY_WORDS;
}

// Whether the buffers hold what an instruction needs. C: the array; D: the rest (fastcar_step_config.hpp); T: the controller.
template <class C, class D, class T>
bool is_held(const Fields& f, const Sizes& sizes) {
    FASTCAR_NO_INLINE
    switch (f.opcode) {
        case OP_LINEAR:
            return has<D>(OP_LINEAR) && linear_held<C, D>(f, sizes);
        case OP_MLP:
            return has<D>(OP_MLP) && mlp_held<C, D>(f, sizes);
        case OP_DRAFT:
            return has<D>(OP_DRAFT) && draft_held<C, D>(f, sizes);
        case OP_NORM:
        case OP_LAYER_NORM:
            return f.word[NORM_COUNT] <= D::NORM_WORDS;
        case OP_ROTATE:
            return has<D>(OP_ROTATE) && 2 * f.word[ROTATE_HALF_WORDS] <= static_cast<uint32_t>(D::BLOCKS * cache::BLOCK_FLOAT_WORDS);
        case OP_APPEND_KEYS:
        case OP_APPEND_VALUES:
            return has<D>(OP_APPEND_KEYS) && f.word[APPEND_KEYS_BLOCKS] <= D::BLOCKS;
        case OP_ATTEND:
            return has<D>(OP_ATTEND) && f.word[ATTEND_BLOCKS] <= D::BLOCKS;
        case OP_DECIDE:
            return has<D>(OP_DECIDE) && f.layer < D::LAYERS && decide_held<D, T>(f, sizes);
        case OP_DECIDE_ROWS:
            return has<D>(OP_DECIDE_ROWS) && (f.word[DECIDE_ROWS_UNITS] > 0) == (T::GATE == drs::GATE_LEARNED);
        default:
            return true;
    }
}

// What stays on chip from launch to launch.
template <int INSTRUCTIONS>
struct Loaded {
    Program<INSTRUCTIONS> program;
    uint32_t refused;  // the first instruction that the kernel cannot execute, or the number of them
};

// Loads a control table and its program; returns the status. Without one of them there is none.
template <class C, class D, class T>
uint32_t load_program(const word_t* memory, uint32_t bytes, uint32_t header[drs::HEADER_WORDS], uint32_t words[T::TABLE_WORDS],
                      Loaded<D::INSTRUCTIONS>& loaded) {
    FASTCAR_NO_INLINE
    uint32_t status = drs::load_table<T>(memory, bytes, header, words);
    loaded.program.count = 0;
    if (status == drs::OK) status = load<D::INSTRUCTIONS, D>(memory, header, loaded.program);
    const Sizes& sizes = loaded.program.sizes;
    const bool held = sizes.rows <= D::ROWS && sizes.videos * D::SHARED == sizes.rows && sizes.x_words <= D::X_WORDS && sizes.a_words <= D::A_WORDS &&
                      sizes.y_words <= D::Y_WORDS && sizes.ports == C::PORTS && sizes.positions <= D::POSITIONS;
    const uint32_t count = status == drs::OK && held ? loaded.program.count : 0;
    loaded.program.count = count;
    loaded.refused = count;
check_instructions:
    for (uint32_t i = 0; i < count; ++i) {
        FASTCAR_TRIPS(1, D::INSTRUCTIONS)
        const Fields f = instruction_of<D::INSTRUCTIONS>(loaded.program, i);
        const bool fits = is_held<C, D, T>(f, sizes);
        loaded.refused = !fits && i < loaded.refused ? i : loaded.refused;
    }
    return status == drs::OK && !held && header[drs::F_INSTRUCTIONS] != 0 ? static_cast<uint32_t>(drs::BAD_HEADER) : status;
}

// What a launch executes and how it ends: `number` is that of the instruction that did not.
struct Outcome {
    uint32_t count;
    uint32_t status;
    uint32_t number;
};

// A launch begins at the first instruction, or behind an END.
template <int INSTRUCTIONS>
bool starts_at(const Program<INSTRUCTIONS>& program, uint32_t entry) {
    FASTCAR_NO_INLINE
    return entry == 0 || (entry < program.count && instruction_of<INSTRUCTIONS>(program, entry - 1).opcode == OP_END);
}

// Reads the list of rows. Returns the first active row of no video, or the number of rows.
template <class D>
uint32_t read_row_list(const word_t* input, const Sizes& sizes, const uint32_t header[drs::HEADER_WORDS], Rows<D>& rows) {
    FASTCAR_NO_INLINE
    uint32_t bad = sizes.rows;
    rows.active = 0;
    rows.deciding = 0;
    rows.computes = 0xFFFFFFFFu;
read_each_row:
    for (uint32_t b = 0; b < sizes.rows; ++b) {
        FASTCAR_TRIPS(1, D::ROWS)
        const word_t word = input[b];
        const uint32_t position = lane_bits(word, 0), step = lane_bits(word, 1), place = lane_bits(word, 2);
        const uint32_t active = (place >> ACTIVE_BIT) & 1u, video = place & 0xFFFFu;
        const uint32_t deciding = step != NO_STEP ? active : 0;
        rows.position[b] = position;
        rows.step[b] = step;
        rows.video[b] = video;
        rows.before[b] = lane_bits(word, 3);
        rows.active |= active << b;
        rows.deciding |= deciding << b;
        if (deciding != 0 && !drs::recomputes(header, step)) rows.computes &= ~(1u << b);
        const bool fits = D::SHARED > 1 ? video == b / D::SHARED : video < sizes.videos;
        bad = (active != 0 || rows.before[b] != 0) && !fits && b < bad ? b : bad;
    }
    return bad;
}

// Nothing is executed of a program that the kernel does not hold whole, or for rows that cannot be.
template <class C, class D, class T>
Outcome begin(const Launch& launch, const word_t* program, const word_t* input, uint32_t header[drs::HEADER_WORDS],
              uint32_t words[T::TABLE_WORDS], Loaded<D::INSTRUCTIONS>& loaded, Rows<D>& rows) {
    FASTCAR_NO_INLINE
    Outcome outcome = {0, DONE, 0};
    if (launch.op == LOAD) {
        outcome.status = load_program<C, D, T>(program, launch.bytes, header, words, loaded);
    } else {
        const bool ready = launch.op == RUN && loaded.program.count > 0 && starts_at<D::INSTRUCTIONS>(loaded.program, launch.entry);
        const bool held = loaded.refused == loaded.program.count;
        outcome.status = !ready ? NOT_LOADED : held ? DONE : NOT_HELD;
        outcome.number = held ? 0 : loaded.refused;
        if (outcome.status == DONE) {
            const uint32_t bad = read_row_list<D>(input, loaded.program.sizes, header, rows);
            const bool good = bad == loaded.program.sizes.rows;
            outcome.status = good ? DONE : BAD_ROW;
            outcome.number = good ? 0 : bad;
        }
        outcome.count = outcome.status == DONE ? loaded.program.count : 0;
    }
    return outcome;
}

// The outcome after instruction `number`, which the controller may have refused: then the launch ends.
inline Outcome ended(const Outcome& before, uint32_t refused, uint32_t number) {
    FASTCAR_INLINE
    const Outcome stopped = {0, NOT_HELD, number};
    return refused == drs::OK ? before : stopped;
}

// ---- rows of a cache, and slots

// The place of row b's slot among those of a layer.
template <class D>
uint32_t slot_of(const Rows<D>& list, const Sizes& sizes, uint32_t slots, uint32_t b) {
    FASTCAR_INLINE
    return list.step[b] % slots * sizes.videos + list.video[b];
}

// The place that a row of a decode forward writes. Where a video has several rows, the forward may read a wrong guess: it is staged
// behind the slots, and the next launch says which rows are committed.
template <class D>
uint32_t written_of(const Rows<D>& list, const Sizes& sizes, uint32_t slots, uint32_t b) {
    FASTCAR_INLINE
    return D::SHARED > 1 ? slots * sizes.videos + b : slot_of<D>(list, sizes, slots, b);
}

// Copies what some rows of the last launch staged to their slots, `words` each; the places are from word `first` on.
template <class D>
void commit_rows(const Rows<D>& list, const Sizes& sizes, uint32_t slots, uint32_t first, uint32_t words, uint32_t committed,
                 word_t* replay) {
    FASTCAR_NO_INLINE
commit_each_row:
    for (uint32_t b = 0; b < sizes.staged; ++b) {
        FASTCAR_TRIPS(0, D::ROWS)
        const uint32_t count = row_computes(committed, b) ? words : 0;
        const uint32_t from = first + written_of<D>(list, sizes, slots, b) * words;
        const uint32_t to = first + (list.video[b] + (list.before[b] - 1) % slots * sizes.videos) * words;
    commit_words:
        for (uint32_t i = 0; i < count; ++i) {
            FASTCAR_PIPELINE(1)
            FASTCAR_TRIPS(0, D::X_WORDS)
            FASTCAR_INDEPENDENT(replay)
            replay[to + i] = replay[from + i];
        }
    }
}

inline uint32_t row_of(uint32_t position, uint32_t sinks, uint32_t ring) {
    FASTCAR_INLINE
    return position < sinks ? position : sinks + (position - sinks) % ring;
}

// The rows of a cache that are filled and seen when `position` is the newest one.
inline attention::Window window_of(uint32_t position, uint32_t sinks, uint32_t ring, uint32_t window) {
    FASTCAR_INLINE
    const uint32_t known = position + 1;
    const uint32_t behind = known > sinks ? known - sinks : 0;
    const uint32_t kept = behind < ring ? behind : ring;
    const uint32_t count = kept < window ? kept : window;
    const uint32_t shown = known < sinks ? known : sinks;
    const attention::Window found = {shown, sinks + (behind - count) % ring, count, sinks, shown + kept};
    return found;
}

}  // namespace step
}  // namespace fastcar
