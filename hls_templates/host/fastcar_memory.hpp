// Contiguous memory (CMA): what XRT allocates buffers from on a board whose memory is also Linux's.
#pragma once

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "fastcar_error.hpp"

namespace fastcar_host {

static const char* const MEMINFO = "/proc/meminfo";
static const char* const NO_MEMINFO = "none";  // as a path: nothing is checked

// A field of a file such as /proc/meminfo, bytes; 0: it has no such field. Throws Error: the file cannot be read.
inline uint64_t meminfo_bytes(const std::string& path, const std::string& field) {
    std::ifstream file(path);
    if (!file) {
        throw Error("the memory of the board cannot be read", path, "give --meminfo none where there is no such file");
    }
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string name;
        uint64_t kilobytes = 0;
        if (words >> name >> kilobytes && name == field + ":") return 1024 * kilobytes;
    }
    return 0;
}

inline std::string megabytes(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f MB", static_cast<double>(bytes) / 1e6);
    return text;
}

// Buffers of `bytes` bytes are going to be made. Throws Error: less contiguous memory is free.
inline void require_contiguous(uint64_t bytes, const std::string& meminfo) {
    if (meminfo == NO_MEMINFO) return;
    const uint64_t free = meminfo_bytes(meminfo, "CmaFree"), total = meminfo_bytes(meminfo, "CmaTotal");
    if (bytes > free) {
        throw Error("the buffers need " + megabytes(bytes) + " of contiguous memory (CMA), of which " + megabytes(free) +
                        " are free and " + megabytes(total) + " reserved",
                    meminfo,
                    "end other programs that use the board, or reserve more when Linux starts: docs/tutorial/board.md, "
                    "\"Memory under Linux\"; --meminfo none skips this check");
    }
}

}  // namespace fastcar_host
