// Command line of the host programs: ARTIFACT --prompt IDS [--prompt IDS ...] --num-tokens N [more options].
#ifndef FASTCAR_ARGUMENTS_HPP
#define FASTCAR_ARGUMENTS_HPP

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "fastcar_error.hpp"

namespace fastcar_host {

// One --prompt per row, or one for all rows; ids are separated by commas.
struct Arguments {
    std::string artifact;
    std::vector<std::vector<int64_t>> prompts;
    int64_t num_tokens = 256;
    std::map<std::string, std::string> options;  // what is not of the above, by name
};

inline int64_t parse_integer(const std::string& option, const std::string& text) {
    char* end = nullptr;
    errno = 0;
    const int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || errno != 0) {
        throw Error(option + " is `" + text + "`", "", "give an integer");
    }
    return value;
}

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

// Options alone, each with a value, by name. Throws Error: one that is not `known`, or anything else.
inline std::map<std::string, std::string> parse_options(int count, char** words, const std::vector<std::string>& known,
                                                        const std::string& usage) {
    std::map<std::string, std::string> options;
    for (int i = 1; i < count; i += 2) {
        const std::string word = words[i];
        if (std::find(known.begin(), known.end(), word) == known.end() || i + 1 == count) {
            throw Error("`" + word + "` is not understood", "", usage);
        }
        options[word] = words[i + 1];
    }
    return options;
}

// `known`: names of further options that take a value. Throws Error: anything else, or no artifact or prompt.
inline Arguments parse_arguments(int count, char** words, const std::vector<std::string>& known, const std::string& usage) {
    Arguments parsed;
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (word.rfind("--", 0) != 0 && parsed.artifact.empty()) {
            parsed.artifact = word;
            continue;
        }
        bool found = word == "--prompt" || word == "--num-tokens";
        for (const std::string& name : known) {
            found = found || word == name;
        }
        if (!found || i + 1 == count) {
            throw Error("`" + word + "` is not understood", "", usage);
        }
        const std::string value = words[++i];
        if (word == "--prompt") {
            parsed.prompts.push_back(parse_ids(value));
        } else if (word == "--num-tokens") {
            parsed.num_tokens = parse_integer(word, value);
        } else {
            parsed.options[word] = value;
        }
    }
    if (parsed.artifact.empty() || parsed.prompts.empty()) {
        throw Error("an artifact and a prompt are needed", "", usage);
    }
    return parsed;
}

// One prompt is repeated for every row.
inline std::vector<std::vector<int64_t>> prompt_rows(const Arguments& arguments, int64_t batch) {
    if (arguments.prompts.size() == 1) {
        return std::vector<std::vector<int64_t>>(static_cast<size_t>(batch), arguments.prompts.front());
    }
    return arguments.prompts;
}

inline void print_tokens(const std::vector<std::vector<int64_t>>& tokens) {
    for (const auto& row : tokens) {
        for (size_t i = 0; i < row.size(); ++i) {
            std::printf("%s%lld", i == 0 ? "" : " ", static_cast<long long>(row[i]));
        }
        std::printf("\n");
    }
}

}  // namespace fastcar_host

#endif
