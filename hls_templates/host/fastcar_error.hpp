// Errors of the host program: what is wrong, where, and how to fix it.
#pragma once

#include <stdexcept>
#include <string>

namespace fastcar_host {

// A text for a terminal: names and messages may come from a file, and must not move the cursor or end the line.
inline std::string printable(const std::string& text) {
    std::string plain;
    for (size_t i = 0; i < text.size(); ++i) {
        const unsigned char c = static_cast<unsigned char>(text[i]);
        const unsigned char next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
        const bool control = c == 0xC2 && next >= 0x80 && next < 0xA0;  // U+0080 to U+009F in UTF-8
        plain += control || c < 0x20 || c == 0x7F ? (c == '\n' ? ' ' : '?') : text[i];
        i += control ? 1 : 0;
    }
    return plain;
}

class Error : public std::runtime_error {
public:
    Error(const std::string& what, const std::string& where, const std::string& hint)
        : std::runtime_error(printable(what) + (where.empty() ? "" : "\n  where: " + printable(where)) +
                             (hint.empty() ? "" : "\n  hint:  " + printable(hint))) {}
};

}  // namespace fastcar_host
