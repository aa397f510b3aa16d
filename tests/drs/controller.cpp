// The controller's own functions for ctypes, with the limits of fastcar_drs_config.hpp.
#include "fastcar_drs.hpp"

#include "fastcar_drs_config.hpp"

using namespace fastcar;

static uint32_t header[drs::HEADER_WORDS], table[DrsConfig::TABLE_WORDS];

extern "C" uint32_t load(const word_t* words, uint32_t bytes) { return drs::load_table<DrsConfig>(words, bytes, header, table); }

extern "C" uint32_t decide(uint32_t layer, uint32_t step, const word_t* query, uint32_t query_words, const word_t* key,
                           uint32_t key_words, const word_t* network, const uint32_t* counts, uint32_t* answer) {
    const uint32_t computes = drs::recomputes(header, step) ? 0xFFFFFFFFu : 0u;
    const drs::Call call = {layer, 0xFFFFFFFFu, computes, query_words, key_words, 0, DrsConfig::UNITS};
    answer[drs::R_STATUS] = drs::decide_layer<DrsConfig>(header, table, call, query, key, network, counts, answer);
    return header[drs::F_ROWS];
}
