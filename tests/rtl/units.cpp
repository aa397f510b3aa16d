// Every unit of the engine beside what the emitted C++ computes, clock by clock. Prints the comparisons and the
// differences of each unit. Arguments: trials, seed.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <deque>
#include <random>

#include "Vunits.h"
#include "fastcar_config.hpp"
#include "fastcar_engine_core.hpp"

using namespace fastcar;
typedef Shapes<EngineConfig> S;
static const uint32_t NOT_A_NUMBER = 0x7FC00000u;

// What a unit has to show `clocks` after its operands, and what it showed otherwise.
struct Pipe {
    const char* name;
    size_t clocks;
    std::deque<uint32_t> wanted;
    long compared, different;
    void check(uint32_t want, uint32_t got) {
        wanted.push_back(want);
        if (wanted.size() < clocks + 1) return;
        compared += 1;
        different += wanted.front() != got;
        if (wanted.front() != got && different < 4) fprintf(stderr, "%s: %08x, not %08x\n", name, got, wanted.front());
        wanted.pop_front();
    }
};

static uint32_t bits(float value) { return isnan(value) ? NOT_A_NUMBER : bits_of_float(value); }

// Floats of every size, neighbours of each other and of the ends of the ranges more often than by chance.
static uint32_t draw_float(std::mt19937& random, uint32_t other) {
    static const uint32_t ENDS[] = {0u, 1u, 0x7FFFFFu, 0x800000u, 0x7F7FFFFFu, 0x7F800000u, 0x3F800000u, 0x7FC00000u};
    const uint32_t drawn = random(), sign = random() & 0x80000000u;
    switch (random() % 8) {
        case 0: return ENDS[drawn % 8] | sign;
        case 1: return (other ^ 0x80000000u) + drawn % 5 - 2;
        case 2: return (other & 0xFF800000u) | (drawn & 0x7FFFFFu);
        case 3: return (drawn & 0x7FFFFFu) | sign;
        case 4: return ((127u + drawn % 40 - 20) << 23) | (random() & 0x7FFFFFu) | sign;
        // Half steps of the activation's table, of either range: ties of its rounding.
        case 5: return bits_of_float(static_cast<float>(static_cast<int>(drawn % 131072) - 65536) / 4096.0f);
        default: return drawn;
    }
}

int main(int count, char** arguments) {
    const long trials = count > 1 ? atol(arguments[1]) : 100000;
    std::mt19937 random(count > 2 ? atoi(arguments[2]) : 1);
    Vunits dut;
    const size_t MAC_CLOCKS = 7 + 4 + 1 + (S::LANES == 32 ? 2 : 1) + 1;
    Pipe multiply = {"multiply", 4, {}, 0, 0}, add = {"add", 6, {}, 0, 0}, convert = {"convert", 4, {}, 0, 0};
    Pipe divide = {"divide", 16, {}, 0, 0}, round = {"quantize", 6, {}, 0, 0};
    Pipe activate = {"activate", 14, {}, 0, 0};
    Pipe mac[S::CORES * S::PORTS];
    for (Pipe& pipe : mac) pipe = {"mac_step", MAC_CLOCKS, {}, 0, 0};
    int32_t partial[S::CORES][S::PORTS] = {};
    uint32_t left = 0, right = 0;
    for (long i = 0; i < trials; ++i) {
        left = draw_float(random, right);
        right = draw_float(random, left);
        word_t word[S::PORTS];
        int8_t input[S::CORES][S::LANES];
        const int extreme = random() % 16;
        for (int p = 0; p < S::PORTS; ++p) {
            uint32_t lanes[4];
            for (uint32_t& own : lanes) own = extreme == 0 ? 0x80808080u : extreme == 1 ? 0x7F7F7F7Fu : random();
            word[p] = word_of_bits(lanes[0], lanes[1], lanes[2], lanes[3]);
            memcpy(reinterpret_cast<char*>(&dut.weights) + 16 * p, lanes, sizeof(lanes));
        }
        for (int c = 0; c < S::CORES; ++c) {
            for (int k = 0; k < S::LANES; ++k) {
                input[c][k] = static_cast<int8_t>(extreme < 2 ? (i & 1 ? 127 : -127) : static_cast<int>(random() % 255) - 127);
            }
            memcpy(reinterpret_cast<char*>(&dut.inputs) + c * S::LANES, input[c], S::LANES);
        }
        const bool first = i == 0 || random() % 8 == 0;
        mac_step<S>(word, input, 0xFFFFFFFFu, first, partial);
        // The divider takes what row_amax_floor leaves.
        const float size = row_amax_floor(isnan(float_of_bits(left)) ? 0.0f : fabsf(float_of_bits(left)));
        dut.size = bits_of_float(size);
        dut.left = left;
        dut.right = right;
        dut.first = first;
        dut.clk = 0;
        dut.eval();
        const float a = float_of_bits(left), b = float_of_bits(right);
        multiply.check(bits(a * b), dut.product);
        add.check(bits(a + b), dut.sum);
        convert.check(bits(static_cast<float>(static_cast<int32_t>(left))), dut.number);
        divide.check(bits(127.0f / size), dut.inverse);
        round.check(static_cast<uint8_t>(quantize(a, b)), dut.rounded);
        activate.check(bits(Activate<EngineConfig::ACTIVATION>::of(a)), dut.activated);
        for (int c = 0; c < S::CORES; ++c) {
            for (int p = 0; p < S::PORTS; ++p) {
                uint32_t got;
                memcpy(&got, reinterpret_cast<const char*>(&dut.sums) + 4 * (c * S::PORTS + p), sizeof(got));
                mac[c * S::PORTS + p].check(partial[c][p], got);
            }
        }
        dut.clk = 1;
        dut.eval();
    }
    long compared = 0, different = 0;
    for (const Pipe& pipe : mac) compared += pipe.compared, different += pipe.different;
    for (const Pipe* pipe : {&multiply, &add, &convert, &divide, &round, &activate}) {
        printf("%s %ld %ld\n", pipe->name, pipe->compared, pipe->different);
    }
    printf("mac_step %ld %ld\n", compared, different);
    return 0;
}
