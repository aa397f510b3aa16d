// Command line of the host programs.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "fastcar_sampling.hpp"

namespace fastcar_host {

inline int64_t parse_integer(const std::string& option, const std::string& text) {
    char* end = nullptr;
    errno = 0;
    const int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || errno != 0) throw Error(option + " is `" + text + "`", "", "give an integer");
    return value;
}

// Options, each with a value; the last one of a name counts, but of --prompt all.
struct Arguments {
    std::string artifact;
    std::vector<std::vector<int64_t>> prompts;
    std::map<std::string, std::string> options;

    std::string text(const std::string& name, const std::string& otherwise) const {
        const auto found = options.find(name);
        return found == options.end() ? otherwise : found->second;
    }

    int64_t integer(const std::string& name, int64_t otherwise) const {
        return options.count(name) == 0 ? otherwise : parse_integer(name, options.at(name));
    }
};

inline std::vector<int64_t> parse_ids(const std::string& text) {
    std::vector<int64_t> ids;
    size_t start = 0;
    while (start <= text.size()) {
        const size_t end = std::min(text.find(',', start), text.size());
        ids.push_back(parse_integer("--prompt", text.substr(start, end - start)));
        start = end + 1;
    }
    return ids;
}

// `known`: names of options; those of a program that decodes have --prompt, and then an artifact is named too. `needed`: an option
// that has to be given. Throws Error: anything else.
inline Arguments parse_arguments(int count, char** words, const std::vector<std::string>& known, const std::string& needed,
                                 const std::string& usage) {
    Arguments parsed;
    const auto knows = [&known](const std::string& name) { return std::find(known.begin(), known.end(), name) != known.end(); };
    const bool decodes = knows("--prompt");
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (decodes && word.rfind("--", 0) != 0 && parsed.artifact.empty()) {
            parsed.artifact = word;
            continue;
        }
        if (!knows(word) || i + 1 == count) throw Error("`" + word + "` is not understood", "", usage);
        const std::string value = words[++i];
        if (word == "--prompt") {
            parsed.prompts.push_back(parse_ids(value));
        } else {
            parsed.options[word] = value;
        }
    }
    if (decodes && (parsed.artifact.empty() || parsed.prompts.empty())) {
        throw Error("an artifact and a prompt are needed", "", usage);
    }
    if (!needed.empty() && parsed.options.count(needed) == 0) throw Error("no " + needed + " is given", "", usage);
    return parsed;
}

// What a program does; an error is its text on stderr and status 2.
template <class Work>
int run_program(Work work) {
    try {
        work();
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 2;
    }
}

inline void print_tokens(const std::vector<std::vector<int64_t>>& tokens) {
    for (const auto& row : tokens) {
        for (size_t i = 0; i < row.size(); ++i) {
            std::printf("%s%lld", i == 0 ? "" : " ", static_cast<long long>(row[i]));
        }
        std::printf("\n");
    }
}

// Options of every program that decodes, and how they are given.
static const std::vector<std::string> DECODING = {"--prompt", "--num-tokens", "--temperature", "--top-k", "--seed", "--jacobi",
                                                  "--digest", "--public-key"};
static const char* const DECODING_USAGE =
    "--prompt 16,3 [--prompt IDS ...] [--num-tokens 256] [--temperature 0] [--top-k N] [--seed 0] [--jacobi POSITIONS] ";

inline Sampling sampling_of(const Arguments& arguments) {
    const std::string given = arguments.text("--temperature", "0");
    char* end = nullptr;
    const double temperature = std::strtod(given.c_str(), &end);
    const int64_t top_k = arguments.integer("--top-k", 0), seed = arguments.integer("--seed", 0);
    const bool greedy = !given.empty() && *end == '\0' && temperature == 0 && top_k == 0;
    const bool drawn = *end == '\0' && temperature >= 1e-30 && temperature < INFINITY && top_k >= 0;
    if (seed < 0 || (!greedy && !drawn)) {
        throw Error("no token can be drawn at temperature `" + given + "`, top_k " + std::to_string(top_k) + ", seed " + std::to_string(seed),
                    "", "give a temperature from 1e-30 on, a top_k from 1 on and a seed from 0 on; or temperature 0 alone");
    }
    return {temperature, top_k, static_cast<uint64_t>(seed)};
}

// A decoder's tokens on stdout; one prompt is repeated for every row.
template <class D>
void decode(D& decoder, const DecoderSpec& spec, const Arguments& arguments) {
    const int64_t most = std::min(spec.rows, spec.frame), window = arguments.integer("--jacobi", most);
    if (window < 1 || window > most) {
        throw Error("--jacobi is " + std::to_string(window), "", "give 1 to " + std::to_string(most) + " positions");
    }
    std::vector<std::vector<int64_t>> prompts = arguments.prompts;
    if (prompts.size() == 1) prompts.assign(static_cast<size_t>(spec.batch), prompts.front());
    print_tokens(generate(decoder, spec, prompts, arguments.integer("--num-tokens", 256), sampling_of(arguments), window));
    std::fprintf(stderr, "replay ratio %.4f\n", decoder.replay_ratio());
}

}  // namespace fastcar_host
