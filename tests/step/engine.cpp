// An engine for step programs, for ctypes: fastcar_config.hpp is that of the test's design.
#include "fastcar_config.hpp"
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

fastcar::csim::StepEngine<EngineConfig, StepConfig> engine;

}  // namespace

extern "C" {

uint32_t step_load(const word_t* memory, uint32_t bytes) { return engine.load(memory, bytes); }

int step_run(const word_t* constants, const word_t* weights, word_t* keys, word_t* values, const word_t* input, word_t* output,
             uint32_t position) {
    const fastcar::csim::StepMemory memory = {constants, weights, keys, values, input, output};
    return engine.run(memory, position) ? 1 : 0;
}

}  // extern "C"
