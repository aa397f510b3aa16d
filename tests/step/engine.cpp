// An engine for step programs, for ctypes: fastcar_config.hpp and fastcar_drs_config.hpp are those of the test's decoder.
#include "fastcar_config.hpp"
#include "fastcar_drs_config.hpp"
#include "fastcar_step_csim.hpp"

using fastcar::word_t;

namespace {

struct StepConfig {
    static const int ROWS = 2;
    static const int ROW_WORDS = 160;
    static const int GROUP = 2;
    static const int BLOCKS = 2;
    static const int POSITIONS = 64;
    static const int INSTRUCTIONS = 64;
};

fastcar::csim::StepEngine<EngineConfig, StepConfig, DrsConfig> engine;

}  // namespace

extern "C" {

uint32_t step_load(const word_t* memory, uint32_t bytes) { return engine.load(memory, bytes); }

uint32_t step_load_table(const word_t* table, uint32_t bytes) { return engine.load_table(table, bytes); }

int step_run(const word_t* constants, const word_t* weights, word_t* keys, word_t* values, const word_t* input, word_t* output,
             word_t* replay, uint32_t position, uint32_t step) {
    const fastcar::csim::StepMemory memory = {constants, weights, keys, values, input, output, replay};
    return engine.run(memory, position, step) ? 1 : 0;
}

}  // extern "C"
