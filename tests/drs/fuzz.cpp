// Damaged tables through the kernel with every buffer exactly as long as it was told, for the address sanitizer: the
// controller must end, touch nothing else, and answer with a status it has. Arguments: a good table, number of rounds.
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "fastcar_drs.hpp"

extern "C" void fastcar_drs(const uint32_t* table, const fastcar::word_t* query, const fastcar::word_t* key,
                            const uint32_t* chain, uint32_t* result, uint32_t table_bytes, uint32_t layer,
                            uint32_t step, uint32_t query_words, uint32_t key_words, uint32_t held, uint32_t capacity);

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
        table.resize(random_below(static_cast<uint32_t>(2 * table.size())) + 1, 0x05FF0000u);
    }
    if (random_below(8) != 0 && table.size() > F_WORDS) {
        table[F_WORDS] = static_cast<uint32_t>(table.size());
        table[F_CRC] = crc32_words(table.data(), F_CRC + 1, static_cast<uint32_t>(table.size()));
    }
    return table;
}

}  // namespace

int main(int argc, char** argv) {
    const Table good = read_table(argc > 1 ? argv[1] : "");
    const uint32_t rounds = argc > 2 ? static_cast<uint32_t>(atoi(argv[2])) : 0;
    if (good.size() < HEADER_WORDS || rounds == 0) {
        printf("usage: fuzz TABLE ROUNDS\n");
        return 2;
    }
    const uint32_t words = good[F_ROWS] * head_words_of(good.data());
    uint32_t seen[QUEUE_FULL + 1] = {};
    for (uint32_t round = 0; round < rounds; ++round) {
        const Table table = damaged(good);
        const uint32_t query_words = words * good[F_HEADS] + (random_below(16) == 0 ? 1 : 0);
        const uint32_t key_words = words * good[F_KV_HEADS];
        const std::vector<fastcar::word_t> query(query_words), key(key_words);
        const std::vector<uint32_t> chain(fastcar::INDEX_REGISTER_BITS, random_below(5));
        const uint32_t capacity = random_below(20);
        std::vector<uint32_t> result(R_RECORDS + 2 * capacity, 0xA5A5A5A5u);
        const uint32_t bytes = 4 * static_cast<uint32_t>(table.size()) - random_below(32) / 31;
        fastcar_drs(table.data(), query.data(), key.data(), chain.data(), result.data(), bytes,
                    random_below(good[F_LAYERS] + 1), random_below(200), query_words, key_words, random_word(), capacity);
        if (result[R_STATUS] > QUEUE_FULL || result[R_COUNT] > capacity) {
            printf("FAIL: round %u, status %u, %u record(s)\n", round, result[R_STATUS], result[R_COUNT]);
            return 1;
        }
        ++seen[result[R_STATUS]];
    }
    for (uint32_t status = 0; status <= QUEUE_FULL; ++status) {
        printf("%u ", seen[status]);
    }
    printf("\n");
    return 0;
}
