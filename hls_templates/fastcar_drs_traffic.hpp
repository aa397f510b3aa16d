// What one call of the controller moves over its AXI ports, counted in C simulation when FASTCAR_COUNT_TRAFFIC is defined.
// Hardware has no counters: without the macro both macros are empty.
#ifndef FASTCAR_DRS_TRAFFIC_HPP
#define FASTCAR_DRS_TRAFFIC_HPP

#include <stdint.h>

#if defined(FASTCAR_COUNT_TRAFFIC)

namespace fastcar {
namespace drs {

enum Argument { TABLE, QUERY, KEY, CHAIN, RESULT, ARGUMENTS };

static const uint32_t BURST_BEATS = 256;  // the longest AXI4 burst
static const uint32_t NO_ADDRESS = 0xFFFFFFFFu;

// Bursts and beats of every argument since the last clear(). A burst ends where the address jumps, where a loop begins
// (FASTCAR_BURST), and at 256 beats.
struct Traffic {
    uint32_t bursts[ARGUMENTS];
    uint32_t beats[ARGUMENTS];
    uint32_t next[ARGUMENTS];
    uint32_t length[ARGUMENTS];

    void begin(int argument) { next[argument] = NO_ADDRESS; }
    void beat(int argument, uint32_t address) {
        const bool follows = address == next[argument] && length[argument] < BURST_BEATS;
        bursts[argument] += follows ? 0 : 1;
        length[argument] = follows ? length[argument] + 1 : 1;
        next[argument] = address + 1;
        beats[argument] += 1;
    }
};

// One per library: a member of a template may be defined in a header.
template <int>
struct Counted {
    static Traffic traffic;
};
template <int N>
Traffic Counted<N>::traffic;

}  // namespace drs
}  // namespace fastcar

#define FASTCAR_BURST(argument) fastcar::drs::Counted<0>::traffic.begin(fastcar::drs::argument);
#define FASTCAR_BEAT(argument, address) fastcar::drs::Counted<0>::traffic.beat(fastcar::drs::argument, address);

#else
#define FASTCAR_BURST(argument)
#define FASTCAR_BEAT(argument, address)
#endif

#endif
