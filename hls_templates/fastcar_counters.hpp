// Work that C simulation counts where it is done, with FASTCAR_COUNTERS: iterations of the MAC array and beats on the AXI
// ports of weights. Without the macro, and in hardware, nothing is left of it.
#pragma once

#include <stdint.h>
#include <string.h>

namespace fastcar {

enum Counter { COUNT_MAC, COUNT_WEIGHT_BEATS, COUNTERS };

}  // namespace fastcar

#if defined(FASTCAR_COUNTERS) && !defined(__SYNTHESIS__)
static uint64_t fastcar_counters[fastcar::COUNTERS];
#define FASTCAR_COUNT(counter) ++fastcar_counters[counter];

// Copies what was counted since the last call, in the order of `Counter`, and starts again from zero.
extern "C" void fastcar_csim_counters(uint64_t* counts) {
    memcpy(counts, fastcar_counters, sizeof(fastcar_counters));
    memset(fastcar_counters, 0, sizeof(fastcar_counters));
}
#else
#define FASTCAR_COUNT(counter)
#endif
