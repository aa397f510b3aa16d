// The controller whose decision is the RTL's, with the functions of tests/drs/controller.cpp. Loads and checks are the C++'s.
#include <string.h>

#include "Vfastcar_decide.h"
#include "fastcar_drs.hpp"
#include "fastcar_drs_config.hpp"

using namespace fastcar;

static uint32_t header[drs::HEADER_WORDS], table[DrsConfig::TABLE_WORDS];
static const int64_t LONGEST = 1 << 24;

// A memory whose word is there two clocks after its place.
template <class T>
struct Memory {
    const T* words;
    T register_;
    void clock(uint32_t at, uint32_t count, void* input) {
        memcpy(input, &register_, sizeof(T));
        register_ = at < count ? words[at] : T();
    }
};

static void set_fields(Vfastcar_decide& dut, const drs::Layer& layer, uint32_t computes) {
    dut.rows = header[drs::F_ROWS];
    dut.group = header[drs::F_GROUP];
    dut.head_words = header[drs::F_HEAD_WORDS];
    dut.query_words = header[drs::F_ROW_QUERY_WORDS];
    dut.key_words = header[drs::F_ROW_KEY_WORDS];
    dut.factor = layer.factor;
    dut.threshold = layer.threshold;
    dut.max_chain = header[drs::F_MAX_CHAIN];
    dut.couple = (header[drs::F_FLAGS] & drs::COUPLE_CFG) != 0;
    dut.active = 0xFFFFFFFFu;
    dut.computes = computes;
}

// Returns the clocks from the start to the decision; -1: it does not end.
static int64_t run(const drs::Layer& layer, uint32_t computes, const word_t* query, const word_t* key, const uint32_t* counts,
                   float scores[INDEX_REGISTER_BITS], uint32_t& index_register) {
    static uint32_t weights[DrsConfig::HEAD_ROOM];
    const uint32_t rows = header[drs::F_ROWS];
    const bool weighted = (header[drs::F_FLAGS] & drs::WEIGHTED) != 0;
    for (uint32_t head = 0; head < DrsConfig::HEAD_ROOM; ++head) {
        weights[head] = weighted && head < header[drs::F_HEADS] ? table[layer.weights + head] : bits_of_float(1.0f);
    }
    Memory<word_t> queries = {query, {}}, keys = {key, {}};
    Memory<uint32_t> factors = {weights, 0}, chains = {counts, 0};
    Vfastcar_decide dut;
    set_fields(dut, layer, computes);
    for (int64_t clock = -32; clock < LONGEST; ++clock) {
        dut.reset = clock < 0;
        dut.go = clock == 0;
        dut.clk = 0;
        dut.eval();
        const uint32_t at[] = {dut.query_at, dut.key_at, dut.weight_at, dut.chain_at};
        if (dut.write_score) scores[dut.score_at] = float_of_bits(dut.score);
        if (clock > 0 && dut.done) {
            index_register = dut.index_register;
            return clock;
        }
        dut.clk = 1;
        dut.eval();
        queries.clock(at[0], rows * header[drs::F_ROW_QUERY_WORDS], &dut.query);
        keys.clock(at[1], rows * header[drs::F_ROW_KEY_WORDS], &dut.key);
        factors.clock(at[2], DrsConfig::HEAD_ROOM, &dut.weight);
        chains.clock(at[3], INDEX_REGISTER_BITS, &dut.chain);
    }
    return -1;
}

extern "C" uint32_t load(const word_t* words, uint32_t bytes) { return drs::load_table<DrsConfig>(words, bytes, header, table); }

extern "C" {
int64_t clocks;  // of the last decision
}

extern "C" uint32_t decide(uint32_t layer, uint32_t step, const word_t* query, uint32_t query_words, const word_t* key,
                           uint32_t key_words, const word_t* network, const uint32_t* counts, uint32_t* answer) {
    const uint32_t computes = drs::recomputes(header, step) ? 0xFFFFFFFFu : 0u;
    const drs::Call call = {layer, 0xFFFFFFFFu, computes, query_words, key_words, 0, DrsConfig::UNITS};
    answer[drs::R_STATUS] = drs::decide_layer<DrsConfig>(header, table, call, query, key, network, counts, answer);
    if (answer[drs::R_STATUS] != drs::OK) return header[drs::F_ROWS];
    const drs::Layer fields = drs::read_layer<DrsConfig>(table, header, layer);
    if (drs::has_gate(fields)) {
        float scores[INDEX_REGISTER_BITS] = {};
        uint32_t& index_register = answer[drs::R_INDEX_REGISTER];
        clocks = run(fields, computes, query, key, counts, scores, index_register);
        drs::report_rows(drs::all_rows(header[drs::F_ROWS]), true, index_register, scores, counts, answer);
    }
    return header[drs::F_ROWS];
}
