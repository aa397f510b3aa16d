// Draws and the order of decoding: what a decoder on the CPU and one on an accelerator have in common. Draws are noise of seed,
// sequence, position and token alone, bit for bit as fastcar_compile/ir/draws.py has them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fastcar_error.hpp"
#include "fastcar_program.hpp"

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

// Logits float32 of every row of the batch, at successive positions; they are valid until the decoder's next call.
struct Logits {
    const float* values = nullptr;
    int64_t stride = 0;  // from a row to the next
    int64_t next = 0;    // from a position to the next

    // The token that follows. Throws Error: a logit is not a number, or all are minus infinity. position: of the first logits.
    int64_t choose(const Sampling& sampling, int64_t row, int64_t vocab, int64_t position, int64_t ahead) const {
        const float* first = values + row * stride + ahead * next;
        position += ahead;
        const std::string where = "row " + std::to_string(row) + ", position " + std::to_string(position);
        const float* unknown = std::find_if(first, first + vocab, [](float value) { return std::isnan(value); });
        if (unknown != first + vocab) {
            throw Error("the logit of token " + std::to_string(unknown - first) + " is NaN", where, "compare with fastcar verify");
        }
        const float* top = std::max_element(first, first + vocab);
        if (*top == -INFINITY) {
            throw Error("the logits of all tokens are -inf", where, "the model forbids every token: leave it one");
        }
        if (sampling.temperature == 0) return top - first;
        std::vector<double> scores(first, first + vocab);
        for (double& score : scores) {
            score = (*top < INFINITY ? score : score == INFINITY ? 0.0 : -INFINITY) / sampling.temperature;
        }
        return drawn_token(scores, sampling, static_cast<uint32_t>(row), static_cast<uint32_t>(position));
    }
};

// How far a video is.
struct Progress {
    int64_t position = 0;
    int64_t step = 0;      // decode forwards
    int64_t replayed = 0;  // (forward, layer, row)

    // Throws Error: `count` more positions do not fit the decoder.
    void require_room(const DecoderSpec& spec, int64_t count) const {
        if (position + count > spec.max_seq_len) {
            throw Error(std::to_string(position) + " + " + std::to_string(count) + " tokens do not fit max_seq_len " +
                            std::to_string(spec.max_seq_len),
                        "", "ask for fewer tokens, or compile with a larger max_seq_len");
        }
    }

    void move(int64_t count) {
        position += count;
        step += count;
    }

    // Share of (forward, layer, row) that replayed.
    double replay_ratio(const DecoderSpec& spec) const {
        const int64_t all = step * spec.layers * spec.batch;
        return all == 0 ? 0.0 : static_cast<double>(replayed) / static_cast<double>(all);
    }
};

// Throws Error: the prompt does not fit the decoder, or there is no vocabulary.
inline void check_prompt(const DecoderSpec& spec, const std::vector<std::vector<int64_t>>& prompt, int64_t count) {
    if (spec.takes_embeddings) {
        throw Error("a headless decoder has no tokens to sample", "", "call prefill() and step() with embeddings");
    }
    if (static_cast<int64_t>(prompt.size()) != spec.batch || prompt.front().empty()) {
        throw Error("the prompt has " + std::to_string(prompt.size()) + " row(s)", "",
                    "give " + std::to_string(spec.batch) + " of one length, at least one token each");
    }
    for (const auto& row : prompt) {
        if (row.size() != prompt.front().size()) {
            throw Error("the rows of the prompt have different lengths", "", "give as many tokens for every row");
        }
        for (const int64_t token : row) {
            if (token < 0 || token >= spec.vocab) {
                throw Error("token " + std::to_string(token) + " is outside the vocabulary of " +
                                std::to_string(spec.vocab),
                            "", "use ids 0 .. " + std::to_string(spec.vocab - 1));
            }
        }
    }
    const int64_t length = static_cast<int64_t>(prompt.front().size()) + count - 1;
    if (count < 1 || length > spec.max_seq_len) {
        const auto given = prompt.front().size();
        throw Error(std::to_string(given) + (given == 1 ? " prompt token and " : " prompt tokens and ") + std::to_string(count) +
                        " new ones do not fit max_seq_len " + std::to_string(spec.max_seq_len),
                    "", "ask for fewer tokens");
    }
}

// Tokens [B][count] from a prompt int64 [B][P], by coupled Jacobi decoding: a step reads the last true token, and guesses behind it,
// `window` positions in all; see Forwards.guess of runtime/forwards.py. A window of 1 is sequential, and none changes a token.
// D: a decoder with reset, prefill, step and accept. Throws Error: they do not fit, or there is no vocabulary.
template <class D>
std::vector<std::vector<int64_t>> generate(D& decoder, const DecoderSpec& spec, const std::vector<std::vector<int64_t>>& prompt,
                                           int64_t count, const Sampling& sampling = Sampling(), int64_t window = 1) {
    check_prompt(spec, prompt, count);
    decoder.reset();
    std::vector<std::vector<int64_t>> known(prompt);
    std::vector<int64_t> read;
    for (const auto& row : prompt) read.insert(read.end(), row.begin(), row.end());
    const int64_t begin = static_cast<int64_t>(prompt.front().size()), end = begin + count;
    Logits logits = decoder.prefill(read.data(), begin);
    int64_t width = 1, place = begin - 1, right = 0;  // positions of the last step, the first of them, how many read right tokens
    while (true) {
        int64_t found = 0;
        for (right = width; found < width; ++found) {
            try {
                for (size_t row = 0; row < known.size(); ++row) {
                    const int64_t chosen = logits.choose(sampling, static_cast<int64_t>(row), spec.vocab, place, found);
                    const size_t at = static_cast<size_t>(place + found + 1);
                    right = at < known[row].size() && known[row][at] != chosen ? std::min(right, found + 1) : right;
                    known[row].resize(std::max(known[row].size(), at + 1));
                    known[row][at] = chosen;
                }
            } catch (const Error&) {
                if (found == 0) throw;
                break;
            }
        }
        right = std::min(right, found);
        if (place >= begin) decoder.accept(right);
        place += right;
        if (place + 1 == end) break;
        width = std::min(window, end - 1 - place);
        read.clear();
        for (auto& row : known) {
            for (auto p = static_cast<int64_t>(row.size()); p < place + width; ++p) {  // a guess: the token of one frame earlier
                row.push_back(p >= spec.frame ? row[static_cast<size_t>(p - spec.frame)] : 0);
            }
            read.insert(read.end(), row.begin() + place, row.begin() + place + width);
        }
        logits = decoder.step(read.data(), width);
    }
    for (auto& row : known) row.erase(row.begin(), row.begin() + begin);
    return known;
}

}  // namespace fastcar_host
