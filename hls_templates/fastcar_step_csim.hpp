// A step program executed with the kernels' own functions. For C simulation only; not synthesised.
//
// C: the engine (fastcar_config.hpp). D: what is on chip besides the array: ROWS of the batch, ROW_WORDS words of a row,
// GROUP query heads of a key head, BLOCKS of a head, POSITIONS of the cache (a multiple of 32), INSTRUCTIONS.
#ifndef FASTCAR_STEP_CSIM_HPP
#define FASTCAR_STEP_CSIM_HPP

#include "fastcar_attention_csim.hpp"
#include "fastcar_csim.hpp"
#include "fastcar_drs.hpp"
#include "fastcar_norm_core.hpp"
#include "fastcar_row_core.hpp"
#include "fastcar_step_program.hpp"

namespace fastcar {
namespace csim {

// What a step reads and writes. `weights` is in AXI order, keys and values port after port.
struct StepMemory {
    const word_t* constants;
    const word_t* weights;
    word_t* keys;
    word_t* values;
    const word_t* input;
    word_t* output;
    word_t* replay;
};

static const uint32_t NO_STEP = 0xFFFFFFFFu;  // of a prompt: nothing is decided, replayed or kept

// An engine for step programs. T: its controller (fastcar_drs_config.hpp).
template <class C, class D, class T>
class StepEngine {
  public:
    uint32_t load(const word_t* memory, uint32_t bytes) {
        const uint32_t status = step::load<D::INSTRUCTIONS>(memory, bytes, program_);
        const step::Sizes& sizes = program_.sizes;
        const bool held = sizes.rows <= D::ROWS && sizes.row_words <= D::ROW_WORDS && sizes.ports == C::PORTS &&
                          sizes.positions <= D::POSITIONS;
        program_.count = status == step::OK && held ? program_.count : 0;
        return status == step::OK && !held ? static_cast<uint32_t>(step::BAD_HEADER) : status;
    }

    // Loads the control table; returns the controller's status.
    uint32_t load_table(const word_t* table, uint32_t bytes) {
        crc_ = bytes >= 16 ? lane_bits(table[0], 2) : 0;
        const drs::Call none = {0, 0, 0, 0, 0, drs::NO_LAYER, 0, 0};
        return control(drs::OP_TABLE, table, bytes, none, nullptr);
    }

    // One step at `position`, decode forward `step` or NO_STEP. Returns false where an instruction needs more than this engine
    // has; the step ends there.
    bool run(const StepMemory& memory, uint32_t position, uint32_t step) {
        memory_ = memory;
        position_ = position;
        step_ = step;
        computing_ = 0xFFFFFFFFu;
        for (uint32_t i = 0; i < program_.count; ++i) {
            if (!execute(step::fields_of(program_.words + i * step::INSTRUCTION_BEATS))) {
                return false;
            }
        }
        return program_.count > 0;
    }

  private:
    typedef step::Fields Fields;

    bool execute(const Fields& f) {
        switch (f.opcode) {
            case step::OP_LINEAR:
                return linear(f);
            case step::OP_MLP:
                return mlp(f);
            case step::OP_APPEND_KEYS:
            case step::OP_APPEND_VALUES:
                return append(f);
            case step::OP_ATTEND:
                return attention_of(f);
            case step::OP_DECIDE:
                return decide(f);
            case step::OP_REPLAY:
                replay(f);
                return true;
            default:
                for (uint32_t b = 0; b < program_.sizes.rows; ++b) {
                    row_operation(f, b);
                }
                return true;
        }
    }

    void row_operation(const Fields& f, uint32_t b) {
        if (f.opcode == step::OP_LOAD) {
            const uint32_t words = f.word[step::LOAD_COUNT];
            memcpy(static_cast<void*>(rows_[f.word[step::LOAD_TARGET]][b]), memory_.input + b * words, sizeof(word_t) * words);
        } else if (f.opcode == step::OP_ADD) {
            row::add_row<D::ROW_WORDS>(rows_[f.word[step::ADD_TARGET]][b], rows_[f.word[step::ADD_SOURCE]][b],
                                       f.word[step::ADD_COUNT]);
        } else if (f.opcode == step::OP_NORM) {
            norm_row(f, b);
        } else if (f.opcode == step::OP_ROTATE) {
            rotate_row(f, b);
        }
    }

    void norm_row(const Fields& f, uint32_t b) {
        const uint32_t words = f.word[step::NORM_COUNT];
        for (uint32_t piece = 0; piece < f.word[step::NORM_PIECES]; ++piece) {
            norm::normalize<D::ROW_WORDS, D::ROW_WORDS>(
                rows_[f.word[step::NORM_SOURCE]][b], f.word[step::NORM_FIRST] + piece * words, words,
                memory_.constants + f.word[step::NORM_WEIGHT], float_of_bits(f.word[step::NORM_INVERSE_SIZE]),
                float_of_bits(f.word[step::NORM_EPSILON]), rows_[f.word[step::NORM_TARGET]][b]);
        }
    }

    void rotate_row(const Fields& f, uint32_t b) {
        const uint32_t half = f.word[step::ROTATE_HALF_WORDS], first = f.word[step::ROTATE_FIRST];
        const uint32_t last = f.word[step::ROTATE_TABLE_ROWS] - 1;
        const uint32_t row = position_ < last ? position_ : last;
        const word_t* cosine = memory_.constants + f.word[step::ROTATE_TABLE] + 2 * half * row;
        const row::Rotation shape = {f.word[step::ROTATE_HEADS] * f.word[step::ROTATE_HEAD_WORDS],
                                     f.word[step::ROTATE_HEAD_WORDS], half};
        row::rotate_row<D::ROW_WORDS, D::ROW_WORDS>(rows_[f.word[step::ROTATE_SOURCE]][b] + first, cosine, cosine + half, shape,
                                                    rows_[f.word[step::ROTATE_TARGET]][b] + first);
    }

    // A product of one row from word `first` of every section on; `inputs` floats of `from`, words of `to`.
    void multiply(const Product& product, uint32_t first, const word_t* from, word_t* to) {
        if (from != nullptr) {
            memcpy(values_[0][0], from, sizeof(float) * product.inputs);
        }
        run_product<C>(product, memory_.weights, static_cast<int>(program_.sizes.weight_words), static_cast<int>(first),
                       values_, nullptr, to);
    }

    bool in_section(const Product& product, uint64_t first) const {
        return first + static_cast<uint64_t>(product_words(product)) <= program_.sizes.weight_words;
    }

    bool linear(const Fields& f) {
        const bool bias = f.word[step::LINEAR_BIAS] != 0;
        const int inputs = static_cast<int>(f.word[step::LINEAR_INPUTS]);
        const int channels = static_cast<int>(f.word[step::LINEAR_CHANNELS]);
        const int tile = static_cast<int>(f.word[step::LINEAR_TILE]), tiles = static_cast<int>(f.word[step::LINEAR_TILES]);
        if (!fastcar::linear_fits<C>(inputs, channels, tile, tiles, bias)) {
            return false;
        }
        const Product product = make_product<typename Shapes<C>::Format>(inputs, channels, tile, tiles, false, bias);
        if (!in_section(product, f.word[step::LINEAR_WEIGHTS])) {
            return false;
        }
        const uint32_t words = static_cast<uint32_t>(words_for(channels, FLOAT_LANES));
        for (uint32_t b = 0; b < program_.sizes.rows; ++b) {
            word_t* to = f.word[step::LINEAR_TARGET] == step::OUTPUT_ROWS ? memory_.output + b * words
                                                                         : rows_[f.word[step::LINEAR_TARGET]][b];
            multiply(product, f.word[step::LINEAR_WEIGHTS], rows_[f.word[step::LINEAR_SOURCE]][b], to);
        }
        return true;
    }

    bool mlp(const Fields& f) {
        const Product first = first_product<C>(), last = last_product<C>(OP_MLP, 0, 0, 0, 0);
        const uint32_t weights = f.word[step::MLP_WEIGHTS], second = weights + static_cast<uint32_t>(product_words(first));
        if (!in_section(last, second) || words_for(C::HIDDEN, FLOAT_LANES) > static_cast<int>(program_.sizes.row_words)) {
            return false;
        }
        for (uint32_t b = 0; b < program_.sizes.rows; ++b) {
            if (((computing_ >> b) & 1u) == 0) {
                continue;
            }
            multiply(first, weights, rows_[f.word[step::MLP_SOURCE]][b], nullptr);
            multiply(last, second, nullptr, rows_[f.word[step::MLP_TARGET]][b]);
        }
        return true;
    }

    // Keys and values have the same fields.
    bool append(const Fields& f) {
        const uint32_t blocks = f.word[step::APPEND_KEYS_BLOCKS], heads = f.word[step::APPEND_KEYS_HEADS];
        const uint32_t row = row_of(position_, f.word[step::APPEND_KEYS_SINKS], f.word[step::APPEND_KEYS_RING]);
        if (blocks > D::BLOCKS) {
            return false;
        }
        for (uint32_t number = 0; number < program_.sizes.rows * heads; ++number) {
            const word_t* from = rows_[f.word[step::APPEND_KEYS_SOURCE]][number / heads];
            const uint32_t head_words = blocks * cache::BLOCK_FLOAT_WORDS;
            int8_t mantissas[D::BLOCKS * cache::BLOCK];
            int8_t exponents[D::BLOCKS];
            cache::quantize_head<D::ROW_WORDS, D::BLOCKS>(from, f.word[step::APPEND_KEYS_FIRST] + number % heads * head_words,
                                                          head_words, mantissas, exponents);
            store(f, number, row, mantissas, exponents);
        }
        return true;
    }

    void store(const Fields& f, uint32_t number, uint32_t row, const int8_t* mantissas, const int8_t* exponents) {
        const step::Sizes& sizes = program_.sizes;
        const uint32_t blocks = f.word[step::APPEND_KEYS_BLOCKS];
        const bool keys = f.opcode == step::OP_APPEND_KEYS;
        const uint64_t words = keys ? step::key_words_of(sizes, blocks) : step::value_words_of(sizes, blocks);
        const uint32_t first = f.word[step::APPEND_KEYS_CACHE] + number * static_cast<uint32_t>(words);
        const uint32_t head = (blocks * cache::BLOCK_WORDS + C::PORTS - 1) / C::PORTS;
        for (uint32_t p = 0; p < C::PORTS; ++p) {
            if (keys) {
                word_t* section = memory_.keys + static_cast<uint64_t>(p) * sizes.key_words;
                cache::append_key<D::BLOCKS, C::PORTS>(mantissas, exponents, blocks, first, row, p, section);
            } else {
                word_t* section = memory_.values + static_cast<uint64_t>(p) * sizes.value_words;
                cache::append_value<D::BLOCKS, C::PORTS>(mantissas, exponents, blocks, head, first, row, p, section);
            }
        }
    }

    bool attention_of(const Fields& f) {
        const step::Sizes& sizes = program_.sizes;
        const uint32_t blocks = f.word[step::ATTEND_BLOCKS], heads = f.word[step::ATTEND_KEY_HEADS];
        if (blocks > D::BLOCKS || f.word[step::ATTEND_HEADS] != heads * D::GROUP) {
            return false;
        }
        const attention::Window window = window_of(position_, f.word[step::ATTEND_SINKS], f.word[step::ATTEND_RING],
                                                   f.word[step::ATTEND_WINDOW]);
        for (uint32_t number = 0; number < sizes.rows * heads; ++number) {
            const uint64_t key = f.word[step::ATTEND_KEYS] + number * step::key_words_of(sizes, blocks);
            const uint64_t value = f.word[step::ATTEND_VALUES] + number * step::value_words_of(sizes, blocks);
            const uint32_t first = number % heads * D::GROUP * blocks * cache::BLOCK_FLOAT_WORDS;
            attend<D::GROUP, C::PORTS, D::BLOCKS, D::POSITIONS, D::ROW_WORDS>(
                rows_[f.word[step::ATTEND_SOURCE]][number / heads], first, blocks, memory_.keys + key, sizes.key_words,
                memory_.values + value, sizes.value_words, window, float_of_bits(f.word[step::ATTEND_FACTOR]),
                rows_[f.word[step::ATTEND_TARGET]][number / heads]);
        }
        return true;
    }

    uint32_t control(uint32_t op, const word_t* table, uint32_t bytes, const drs::Call& call, const word_t* chain) {
        core_t core_of[INDEX_REGISTER_BITS];
        pass_t pass_of[INDEX_REGISTER_BITS];
        drs::control<T>(op, table, bytes, call, query_, key_, chain, core_of, pass_of, answer_);
        return lane_bits(answer_[0], 0);
    }

    // q of all rows and the cached keys of position - stride, as the controller reads them.
    void gather(const Fields& f) {
        const uint32_t blocks = f.word[step::DECIDE_BLOCKS], heads = f.word[step::DECIDE_KEY_HEADS];
        const uint32_t head_words = blocks * cache::BLOCK_FLOAT_WORDS, query_words = f.word[step::DECIDE_HEADS] * head_words;
        const uint32_t stride = f.word[step::DECIDE_STRIDE], before = position_ > stride ? position_ - stride : 0;
        const uint32_t row = row_of(before, f.word[step::DECIDE_SINKS], f.word[step::DECIDE_RING]);
        const word_t* section = memory_.keys + static_cast<uint64_t>(row % C::PORTS) * program_.sizes.key_words;
        const uint32_t size = static_cast<uint32_t>(step::key_words_of(program_.sizes, blocks));
        for (uint32_t b = 0; b < program_.sizes.rows; ++b) {
            memcpy(static_cast<void*>(query_ + b * query_words), rows_[f.word[step::DECIDE_SOURCE]][b],
                   sizeof(word_t) * query_words);
        }
        for (uint32_t number = 0; number < program_.sizes.rows * heads; ++number) {
            cache::load_key<D::BLOCKS, D::ROWS * D::ROW_WORDS>(section, f.word[step::DECIDE_KEYS] + number * size,
                                                               row / C::PORTS, blocks, number * head_words, key_);
        }
    }

    bool decide(const Fields& f) {
        computing_ = 0xFFFFFFFFu;
        const uint32_t blocks = f.word[step::DECIDE_BLOCKS], head_words = blocks * cache::BLOCK_FLOAT_WORDS;
        if (step_ == NO_STEP || blocks > D::BLOCKS) {
            return blocks <= D::BLOCKS;
        }
        gather(f);
        const uint32_t rows = program_.sizes.rows;
        word_t* chain = memory_.replay + f.word[step::DECIDE_CHAIN] + step_ % f.word[step::DECIDE_STRIDE] * step::CHAIN_BEATS;
        const drs::Call call = {crc_, f.layer, step_, rows * f.word[step::DECIDE_HEADS] * head_words,
                                rows * f.word[step::DECIDE_KEY_HEADS] * head_words, drs::NO_LAYER, MOST_RECORDS, 0xFFFFFFFFu};
        const bool done = control(drs::OP_GATE, nullptr, 0, call, chain) == drs::OK;
        computing_ = lane_bits(answer_[0], 2);
        for (uint32_t i = 0; done && i < step::CHAIN_BEATS; ++i) {
            chain[i] = answer_[drs::R_CHAIN / FLOAT_LANES + i];
        }
        return done;
    }

    void replay(const Fields& f) {
        const uint32_t words = f.word[step::REPLAY_COUNT], rows = program_.sizes.rows;
        for (uint32_t b = 0; b < rows; ++b) {
            word_t* own = rows_[f.word[step::REPLAY_SOURCE]][b];
            if (step_ != NO_STEP) {
                const uint32_t row = step_ % f.word[step::REPLAY_SLOTS] * rows + b;
                word_t* kept = memory_.replay + f.word[step::REPLAY_CACHE] + row * words;
                const bool computes = ((computing_ >> b) & 1u) != 0;
                memcpy(static_cast<void*>(computes ? kept : own), computes ? own : kept, sizeof(word_t) * words);
            }
            row::add_row<D::ROW_WORDS>(rows_[f.word[step::REPLAY_TARGET]][b], own, words);
        }
        computing_ = 0xFFFFFFFFu;
    }

    static const uint32_t MOST_RECORDS = 128;

    step::Program<D::INSTRUCTIONS> program_;
    uint32_t crc_;
    uint32_t step_;
    uint32_t computing_;
    word_t query_[D::ROWS * D::ROW_WORDS];
    word_t key_[D::ROWS * D::ROW_WORDS];
    word_t answer_[(drs::R_RECORDS + 2 * MOST_RECORDS) / FLOAT_LANES + 1];
    StepMemory memory_;
    uint32_t position_;
    word_t rows_[step::ROWS_ON_CHIP][D::ROWS][D::ROW_WORDS];
    float values_[C::CORES][Shapes<C>::PASSES][Shapes<C>::INPUTS];
};

}  // namespace csim
}  // namespace fastcar

#endif
