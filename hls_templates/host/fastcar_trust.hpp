// The options by which a user says which artifact is trusted.
#pragma once

#include <string>

#include "fastcar_arguments.hpp"
#include "fastcar_artifact.hpp"

namespace fastcar_host {

static const char* const TRUST_USAGE = "[--digest sha256:HEX] [--public-key FILE]";

// What --digest and --public-key require. Throws Error: a digest that is none.
inline Trust trust_of(const Arguments& arguments) {
    Trust trust;
    const auto digest = arguments.options.find("--digest"), key = arguments.options.find("--public-key");
    if (digest != arguments.options.end()) {
        const std::string text = digest->second, prefix = DIGEST_PREFIX;
        if (text.size() != prefix.size() + 64 || text.rfind(prefix, 0) != 0 ||
            text.find_first_not_of("0123456789abcdef", prefix.size()) != std::string::npos) {
            throw Error("--digest is `" + text + "`", "", "give what `fastcar compile` printed: sha256: and 64 hexadecimal digits");
        }
        trust.digest = text;
    }
    if (key != arguments.options.end()) {
        if (key->second.empty()) {
            throw Error("--public-key names no file", "", "give the PEM file of who must have signed");
        }
        trust.public_key = key->second;
    }
    return trust;
}

}  // namespace fastcar_host
