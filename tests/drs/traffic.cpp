// What the controller moved since the last question: bursts of every argument, then beats.
#include <string.h>

#include "fastcar_drs.hpp"

extern "C" void moved(uint32_t* counts) {
    fastcar::drs::Traffic& traffic = fastcar::drs::Counted<0>::traffic;
    memcpy(counts, traffic.bursts, sizeof(traffic.bursts));
    memcpy(counts + fastcar::drs::ARGUMENTS, traffic.beats, sizeof(traffic.beats));
    traffic = fastcar::drs::Traffic();
}
