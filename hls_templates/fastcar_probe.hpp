// The bandwidth probe: every chosen weight port reads one long run, in the bursts of the engine, and sums it up.
#pragma once

#include <hls_stream.h>
#include <stdint.h>

#include "fastcar_pragmas.hpp"
#include "fastcar_word.hpp"

namespace fastcar {

static const int MOST_PROBED_WORDS = 1 << 24;

// The checksum with one more word: it depends on every bit and on the order of the words.
template <int BITS>
uint32_t probe_step(uint32_t sum, const ap_uint<BITS>& word) {
    FASTCAR_INLINE
    uint32_t lanes = 0;
    for (int lane = 0; lane < BITS / 32; ++lane) {
        lanes ^= word.range(32 * lane + 31, 32 * lane).to_uint();
    }
    return ((sum << 1) | (sum >> 31)) + lanes;
}

// Port P reads `words` words where bit P of `ports` is set, else none. One loop, pipelined: one run of bursts.
template <int P, class W>
void probe_port(const W* weights, uint32_t words, uint32_t ports, hls::stream<uint32_t>& out) {
    FASTCAR_NO_INLINE
    const uint32_t count = (ports >> P & 1u) != 0 ? words : 0;
    uint32_t sum = 0;
read_words:
    for (uint32_t i = 0; i < count; ++i) {
        FASTCAR_PIPELINE(1)
        FASTCAR_TRIPS(0, MOST_PROBED_WORDS)
        sum = probe_step(sum, weights[i]);
    }
    out.write(sum);
}

// First loop: ports unrolled; second: pipelined.
template <int PORTS>
void write_probe(hls::stream<uint32_t> in[PORTS], uint32_t* result) {
    FASTCAR_NO_INLINE
    uint32_t sums[PORTS];
    FASTCAR_PARTITION(sums, 0)
    for (int p = 0; p < PORTS; ++p) {
        FASTCAR_UNROLLED
        sums[p] = in[p].read();
    }
write_result:
    for (int p = 0; p < PORTS; ++p) {
        FASTCAR_PIPELINE(1)
        result[p] = sums[p];
    }
}

}  // namespace fastcar
