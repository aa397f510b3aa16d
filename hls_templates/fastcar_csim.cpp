// C simulation entries for ctypes; the kernels themselves are called by their own names. Not synthesised.
#include "fastcar_csim.hpp"

#include "fastcar_config.hpp"

// x: one row, float32; weights: the sections of the call, in words at an address of whole words; sums: [channels][sums] of
// each product of the call. Returns 0 when the engine refuses the request.
extern "C" int fastcar_csim_sums(const float* x, const void* weights, uint32_t op, int32_t inputs, int32_t channels,
                                 int32_t tile, int32_t tiles, int32_t* sums) {
    const fastcar::word_t* words = static_cast<const fastcar::word_t*>(weights);
    return fastcar::csim::sums_of_row<EngineConfig>(x, words, op, inputs, channels, tile, tiles, sums);
}

#if defined(FASTCAR_COUNTERS)
uint64_t fastcar_counters[fastcar::COUNTERS];

// Copies what was counted since the last call, in the order of `Counter`, and starts again from zero.
extern "C" void fastcar_csim_counters(uint64_t* counts) {
    memcpy(counts, fastcar_counters, sizeof(fastcar_counters));
    memset(fastcar_counters, 0, sizeof(fastcar_counters));
}
#endif
