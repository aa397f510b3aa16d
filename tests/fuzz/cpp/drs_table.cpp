// The DRS controller's reader of a table: the bytes as they are, then with the magic, version, length and CRC-32 that fit.
// A table that is taken decides its layers. All buffers are exactly as long as the controller may touch.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fastcar_drs.hpp"

namespace {

using namespace fastcar::drs;

template <uint32_t KIND>
struct Limits {
    static const uint32_t CORES = 2, ROWS = 32, QUERY_WORDS = 1024, KEY_WORDS = 64, UNITS = 64, HEADS = 16;
    static const int TABLE_WORDS = 4096, INSTRUCTIONS = 64, HEAD_ROOM = 16;
    static const uint32_t GATE = KIND;
};

// The first and the last layer, and one that is not there. A network is no part of the table, so its gate is left out.
template <uint32_t KIND>
void decide(const uint32_t header[HEADER_WORDS], const uint32_t words[Limits<KIND>::TABLE_WORDS]) {
    const uint32_t layers = header[F_LAYERS];
    const std::vector<fastcar::word_t> query(header[F_QUERY_WORDS], fastcar::word_of_bits(0x7FC00000u, 1, 2, 0x7F800000u));
    const std::vector<fastcar::word_t> key(header[F_KEY_WORDS], query.empty() ? fastcar::word_t(0) : query[0]);
    for (const uint32_t layer : {0u, layers - 1, layers}) {
        const uint32_t counts[fastcar::INDEX_REGISTER_BITS] = {};
        uint32_t answer[ANSWER_WORDS];
        const Call call = {layer, 0xFFFFFFFFu, 0, header[F_QUERY_WORDS], header[F_KEY_WORDS], 0, 0};
        const Status status = decide_layer<Limits<KIND>>(header, words, call, query.data(), key.data(), nullptr, counts, answer);
        if (status != (layer < layers ? OK : BAD_LAYER)) {
            std::abort();
        }
    }
}

// A status that is none, or a table that is taken and whose layers lie outside of it, is a finding.
template <uint32_t KIND>
void load(const std::vector<uint32_t>& table, uint32_t bytes) {
    std::vector<fastcar::word_t> memory((table.size() + 3) / 4, fastcar::word_t(0));
    if (!table.empty()) {
        std::memcpy(static_cast<void*>(memory.data()), table.data(), 4 * table.size());
    }
    std::vector<uint32_t> header(HEADER_WORDS), words(Limits<KIND>::TABLE_WORDS);
    const Status status = load_table<Limits<KIND>>(memory.data(), bytes, header.data(), words.data());
    if (status > BAD_HEADER) {
        std::abort();
    }
    if (status == OK && (HEADER_WORDS + 2 * header[F_LAYERS] > bytes / 4 || header[F_GATE] != KIND)) {
        std::abort();
    }
    if (status == OK && KIND != GATE_LEARNED) {
        decide<KIND>(header.data(), words.data());
    }
}

void load_all(const std::vector<uint32_t>& table, uint32_t bytes) {
    load<GATE_TAS>(table, bytes);
    load<GATE_INPUT_DELTA>(table, bytes);
    load<GATE_LEARNED>(table, bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    std::vector<uint32_t> table((size + 3) / 4);
    if (size != 0) {
        std::memcpy(table.data(), data, size);
    }
    load_all(table, static_cast<uint32_t>(size));
    table.resize(size / 4);
    if (table.size() > F_WORDS) {
        table[F_MAGIC] = MAGIC;
        table[F_VERSION] = VERSION;
        table[F_WORDS] = static_cast<uint32_t>(table.size());
        uint32_t crc = 0xFFFFFFFFu;
        for (size_t i = F_CRC + 1; i < table.size(); ++i) {
            crc = crc_step(crc, table[i]);
        }
        table[F_CRC] = ~crc;
        load_all(table, static_cast<uint32_t>(4 * table.size()));
    }
    return 0;
}
