// Draws, as fastcar_compile/ir/draws.py has them: noise of seed, sequence, position and token alone, bit for bit the same.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace fastcar_host {

// How tokens are chosen; see Sampling of runtime/sampling.py. temperature 0: the most probable token. top_k 0: of all tokens.
struct Sampling {
    double temperature = 0.0;
    int64_t top_k = 0;
    uint64_t seed = 0;
};

// Philox4x32-10 (Salmon et al., SC 2011).
inline std::array<uint32_t, 4> philox(uint64_t key, std::array<uint32_t, 4> counter) {
    uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round, low += 0x9E3779B9u, high += 0xBB67AE85u) {
        const uint64_t first = counter[0] * 0xD2511F53ull, second = counter[2] * 0xCD9E8D57ull;
        counter = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ low, static_cast<uint32_t>(second),
                   static_cast<uint32_t>(first >> 32) ^ counter[3] ^ high, static_cast<uint32_t>(first)};
    }
    return counter;
}

// Gumbel variables in units of log2, at the knots of a table: multiples of 2^-20, so that what is between two knots is exact.
inline const std::vector<double>& gumbel_knots() {
    static std::vector<double> knots;
    for (int j = static_cast<int>(knots.size()); j <= 32 * 2048; ++j) {
        const double share = j == 32 * 2048 ? 1 - std::ldexp(1.0, -33) : std::ldexp(1 + j % 2048 / 2048.0, j / 2048 - 32);
        knots.push_back(std::rint(-std::log2(-std::log1p(-share) / std::log(2.0)) * 1048576.0) / 1048576.0);
    }
    return knots;
}

// -log2(-log2(1 - w)) for w = (word | 1) / 2^32, by the table.
inline double gumbel(uint32_t word) {
    const float value = static_cast<float>(word | 1u);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const std::vector<double>& knots = gumbel_knots();
    const size_t place = (bits >> 12) - (127u << 11);
    const double next = place + 1 < knots.size() ? knots[place + 1] : knots[place];
    return (next - knots[place]) / 4096.0 * (bits & 4095u) + knots[place];
}

// The token of the largest `score * log2(e) + noise` among those of the top_k. scores: finite, or minus infinity, and changed.
inline int64_t drawn_token(std::vector<double>& scores, const Sampling& sampling, uint32_t sequence, uint32_t position) {
    const size_t kept = static_cast<size_t>(sampling.top_k);
    double least = -std::numeric_limits<double>::infinity();
    if (kept > 0 && kept < scores.size()) {
        std::vector<double> sorted(scores);
        std::nth_element(sorted.begin(), sorted.begin() + (kept - 1), sorted.end(), std::greater<double>());
        least = sorted[kept - 1];
    }
    std::array<uint32_t, 4> words = {};
    for (size_t token = 0; token < scores.size(); ++token) {
        if (token % 4 == 0) words = philox(sampling.seed, {static_cast<uint32_t>(token / 4), position, sequence, 0});
        // A product in memory is rounded: a compiler must not fuse it with the sum.
        volatile double product = scores[token] * 1.4426950408889634;
        scores[token] = scores[token] < least ? -std::numeric_limits<double>::infinity() : product + gumbel(words[token % 4]);
    }
    return std::max_element(scores.begin(), scores.end()) - scores.begin();
}

}  // namespace fastcar_host
