// Damaged tables through the kernel with every buffer exactly as long as it was told, for the address sanitizer: the
// controller must end, touch nothing else, and answer with a status it has. Every table is loaded, then one layer decided,
// with the table's buffer gone. Arguments: a good table, number of rounds.
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "fastcar_drs.hpp"

extern "C" void fastcar_drs(const fastcar::word_t* table, const fastcar::word_t* query, const fastcar::word_t* key,
                            const fastcar::word_t* chain, fastcar::word_t* result, uint32_t op, uint32_t crc,
                            uint32_t table_bytes, uint32_t layer, uint32_t step, uint32_t query_words,
                            uint32_t key_words);

namespace {

using namespace fastcar::drs;
typedef std::vector<uint32_t> Table;

uint32_t state = 1;

uint32_t random_below(uint32_t limit) {
    state = state * 1664525u + 1013904223u;
    return static_cast<uint32_t>((static_cast<uint64_t>(state) * limit) >> 32);
}

uint32_t random_word() {
    const uint32_t likely[] = {0, 1, 2, 3, 4, 32, 33, 64, 127, 128, 65535, 65536, 0x7FFFFFFFu, 0xFFFFFFFFu};
    return random_below(2) != 0 ? likely[random_below(14)] : random_below(0xFFFFFFFFu);
}

Table read_table(const char* path) {
    Table table;
    FILE* file = fopen(path, "rb");
    for (uint32_t word = 0; file != nullptr && fread(&word, 4, 1, file) == 1;) {
        table.push_back(word);
    }
    if (file != nullptr) {
        fclose(file);
    }
    return table;
}

// Up to three words replaced, sometimes a piece cut off or added; mostly with a length and CRC-32 that fit.
Table damaged(Table table) {
    for (uint32_t i = 0, count = random_below(4); i < count; ++i) {
        const uint32_t at = random_below(random_below(2) != 0 ? HEADER_WORDS : static_cast<uint32_t>(table.size()));
        table[at] = random_below(4) != 0 ? random_word() : table[at] ^ (1u << random_below(32));
    }
    if (random_below(8) == 0) {
        table.resize(random_below(static_cast<uint32_t>(2 * table.size())) + 1);
    }
    if (random_below(8) != 0 && table.size() > F_WORDS) {
        table[F_WORDS] = static_cast<uint32_t>(table.size());
        uint32_t crc = 0xFFFFFFFFu;
        for (size_t i = F_CRC + 1; i < table.size(); ++i) {
            crc = crc_step(crc, table[i]);
        }
        table[F_CRC] = ~crc;
    }
    return table;
}

typedef std::vector<fastcar::word_t> Words;

// Memory of any bits, NaNs and infinities too; exactly as long as told.
Words random_words(uint32_t count) {
    Words words(count);
    for (uint32_t i = 0; i < count; ++i) {
        words[i] = fastcar::word_of_bits(random_word(), random_word(), random_word(), random_word());
    }
    return words;
}

uint32_t load(const Table& table, uint32_t* crc) {
    const uint32_t bytes = 4 * static_cast<uint32_t>(table.size()) - random_below(32) / 31;
    Words result(1);
    *crc = table.size() > F_CRC ? table[F_CRC] : 0;
    Words words((table.size() + 3) / 4, fastcar::word_t(0));
    memcpy(static_cast<void*>(words.data()), table.data(), sizeof(uint32_t) * table.size());
    fastcar_drs(words.data(), nullptr, nullptr, nullptr, result.data(), OP_TABLE, 0, bytes, 0, 0, 0, 0);
    return fastcar::lane_bits(result[0], R_STATUS);
}

uint32_t decide(uint32_t crc, uint32_t query_words, uint32_t key_words, uint32_t layers) {
    const Words query = random_words(query_words), key = random_words(key_words);
    const uint32_t count = random_below(5);
    const Words chain(8, fastcar::word_of_bits(count, count, count, count));
    Words result(ANSWER_WORDS / 4);
    fastcar_drs(nullptr, query.data(), key.data(), chain.data(), result.data(), OP_GATE, crc, 0, random_below(layers + 1),
                random_below(200), query_words, key_words);
    return fastcar::lane_bits(result[0], R_STATUS);
}

int failed(uint32_t round, uint32_t status) {
    printf("FAIL: round %u, status %u\n", round, status);
    return 1;
}

}  // namespace

int main(int argc, char** argv) {
    const Table good = read_table(argc > 1 ? argv[1] : "");
    const uint32_t rounds = argc > 2 ? static_cast<uint32_t>(atoi(argv[2])) : 0;
    if (good.size() < HEADER_WORDS || rounds == 0) {
        printf("usage: fuzz TABLE ROUNDS\n");
        return 2;
    }
    uint32_t seen[BAD_OPERANDS + 1] = {};
    for (uint32_t round = 0; round < rounds; ++round) {
        const uint32_t query_words = good[F_QUERY_WORDS] + (random_below(16) == 0 ? 1 : 0);
        const uint32_t key_words = good[F_KEY_WORDS];
        uint32_t crc = 0;
        uint32_t status = load(damaged(good), &crc);
        const bool loaded = status == OK;
        if (status > BAD_HEADER) {
            return failed(round, status);
        }
        ++seen[status];
        const bool stale = random_below(16) == 0;
        status = decide(stale ? ~crc : crc, query_words, key_words, good[F_LAYERS]);
        if ((status != OK && status < NO_TABLE) || status > BAD_OPERANDS || (status == NO_TABLE) != (!loaded || stale)) {
            return failed(round, status);
        }
        ++seen[status];
    }
    for (uint32_t status = 0; status <= BAD_OPERANDS; ++status) {
        printf("%u ", seen[status]);
    }
    printf("\n");
    return 0;
}
