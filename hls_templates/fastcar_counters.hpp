// Work that C simulation counts where it is done, with FASTCAR_COUNTERS: iterations of the MAC array and beats on the AXI
// ports of weights. Without the macro, and in hardware, nothing is left of it.
#ifndef FASTCAR_COUNTERS_HPP
#define FASTCAR_COUNTERS_HPP

#include <stdint.h>

namespace fastcar {

enum Counter { COUNT_MAC, COUNT_WEIGHT_BEATS, COUNTERS };

}  // namespace fastcar

#if defined(FASTCAR_COUNTERS) && !defined(__SYNTHESIS__)
extern uint64_t fastcar_counters[fastcar::COUNTERS];
#define FASTCAR_COUNT(counter) ++fastcar_counters[counter];
#else
#define FASTCAR_COUNT(counter)
#endif

#endif
