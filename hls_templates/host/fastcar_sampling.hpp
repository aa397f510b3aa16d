// Greedy sampling: what a decoder on the CPU and one on an accelerator have in common.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fastcar_error.hpp"
#include "fastcar_program.hpp"

namespace fastcar_host {

// Logits float32 of every row of the batch; they are valid until the decoder's next call.
struct Logits {
    const float* values = nullptr;
    int64_t stride = 0;  // from a row to the next

    // Throws Error: a logit is not a number, or all are minus infinity. position: of the logits.
    int64_t largest(int64_t row, int64_t vocab, int64_t position) const {
        const float* first = values + row * stride;
        const std::string where = "row " + std::to_string(row) + ", position " + std::to_string(position);
        const float* unknown = std::find_if(first, first + vocab, [](float value) { return std::isnan(value); });
        if (unknown != first + vocab) {
            throw Error("the logit of token " + std::to_string(unknown - first) + " is NaN", where, "compare with fastcar verify");
        }
        const float* top = std::max_element(first, first + vocab);
        if (*top == -INFINITY) {
            throw Error("the logits of all tokens are -inf", where, "the model forbids every token: leave it one");
        }
        return top - first;
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

// Greedy tokens [B][count] from a prompt int64 [B][P]. D: a decoder with reset, prefill and step.
// Throws Error: they do not fit, or there is no vocabulary.
template <class D>
std::vector<std::vector<int64_t>> generate(D& decoder, const DecoderSpec& spec,
                                           const std::vector<std::vector<int64_t>>& prompt, int64_t count) {
    check_prompt(spec, prompt, count);
    decoder.reset();
    std::vector<int64_t> flat, next(prompt.size());
    for (const auto& row : prompt) {
        flat.insert(flat.end(), row.begin(), row.end());
    }
    std::vector<std::vector<int64_t>> tokens(prompt.size());
    const int64_t position = static_cast<int64_t>(prompt.front().size()) - 1;
    Logits logits = decoder.prefill(flat.data(), position + 1);
    for (int64_t i = 0; i < count; ++i) {
        for (size_t row = 0; row < next.size(); ++row) {
            next[row] = logits.largest(static_cast<int64_t>(row), spec.vocab, position + i);
            tokens[row].push_back(next[row]);
        }
        if (i + 1 < count) {
            logits = decoder.step(next.data());
        }
    }
    return tokens;
}

}  // namespace fastcar_host
