// What the controller moves over its AXI ports, counted in C simulation: included before the controller's sources.
#include <stdint.h>
#include <string.h>

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

static Traffic traffic;

}  // namespace drs
}  // namespace fastcar

#define FASTCAR_BURST(argument) fastcar::drs::traffic.begin(fastcar::drs::argument);
#define FASTCAR_BEAT(argument, address) fastcar::drs::traffic.beat(fastcar::drs::argument, address);

// Bursts of every argument since the last question, then beats.
extern "C" void moved(uint32_t* counts) {
    fastcar::drs::Traffic& traffic = fastcar::drs::traffic;
    memcpy(counts, traffic.bursts, sizeof(traffic.bursts));
    memcpy(counts + fastcar::drs::ARGUMENTS, traffic.beats, sizeof(traffic.beats));
    traffic = fastcar::drs::Traffic();
}
