// JSON by nlohmann/json: its errors become ours.
#pragma once

#if !__has_include(<nlohmann/json.hpp>)
#error "nlohmann/json.hpp is missing: install it (Debian: nlohmann-json3-dev), or give JSON_INCLUDE=FOLDER"
#endif

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "fastcar_error.hpp"

namespace fastcar_host {

// The JSON of a file. Throws Error: it is none. The library's own message would repeat bytes of the file.
inline nlohmann::json parse_json(const std::string& text, const std::string& where) {
    try {
        return nlohmann::json::parse(text);
    } catch (const nlohmann::json::parse_error& error) {
        throw Error("the file is damaged: no JSON at byte " + std::to_string(error.byte), where, "copy the artifact again");
    }
}

// A number that is neither negative nor a fraction: get() would convert one that does not fit. Throws Error: it is something
// else, which may be too deep to be shown.
inline uint64_t whole_number(const nlohmann::json& value, const std::string& where) {
    if (!value.is_number_unsigned()) {
        throw Error("the file is damaged: a version or a size is no whole number", where, "copy the artifact again");
    }
    return value.get<uint64_t>();
}

}  // namespace fastcar_host
