// Index Register and Mapping Registers of Dynamic Resource Scheduling (docs/reference/drs_table.md). A core is one slot of
// the array; the cores work in lock step, and a tile stays on chip for as many passes as the busiest core has rows.
#pragma once

#include <stdint.h>

#include "fastcar_pragmas.hpp"

namespace fastcar {

static const int INDEX_REGISTER_BITS = 32;

// Core and pass are below 32: there are no more rows.
static const int PLACE_BITS = 5;
typedef ap_uint<PLACE_BITS> core_t;
typedef ap_uint<PLACE_BITS> pass_t;

inline bool row_computes(uint32_t index_register, int row) {
    FASTCAR_INLINE
    return ((index_register >> row) & 1u) != 0;
}

// Core and pass of every row; those of a replayed row are 0. Returns how many passes there are.
// The i-th computing row goes to core i mod C in pass i div C.
template <int BITS>
int place_rows(uint32_t index_register, int rows, int cores, ap_uint<BITS> core_of[INDEX_REGISTER_BITS],
             pass_t pass_of[INDEX_REGISTER_BITS]) {
    FASTCAR_INLINE
    int core = 0;
    int pass = 0;
rows:
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        const bool computes = row < rows && row_computes(index_register, row);
        const bool last = core + 1 == cores;
        core_of[row] = computes ? core : 0;
        pass_of[row] = computes ? pass : 0;
        pass += computes && last ? 1 : 0;
        core = !computes ? core : last ? 0 : core + 1;
    }
    return core == 0 ? pass : pass + 1;
}

// Passes over the rows of a mask, which are the first of those that were placed.
inline int passes_of(uint32_t mask, const pass_t pass_of[INDEX_REGISTER_BITS]) {
    FASTCAR_INLINE
    int passes = 0;
passes:
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        const int own = row_computes(mask, row) ? pass_of[row].to_int() + 1 : 0;
        passes = own > passes ? own : passes;
    }
    return passes;
}

// Places of the rows that compute, and of those of them that leave.
struct Occupied {
    uint64_t computing;
    uint64_t last_rows;
};

// Bit pass * CORES + core is 1 where a row computes there: at most 32 rows + CORES - 1 places.
template <int CORES, int BITS>
Occupied occupied_places(uint32_t index_register, uint32_t last_rows, int rows, const ap_uint<BITS> core_of[INDEX_REGISTER_BITS],
                         const pass_t pass_of[INDEX_REGISTER_BITS]) {
    FASTCAR_INLINE
    Occupied occupied = {0, 0};
places:
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        const bool computes = row < rows && row_computes(index_register, row);
        const int place = pass_of[row].to_int() * CORES + core_of[row].to_int();
        const uint64_t own = computes ? 1ull << place : 0ull;
        occupied.computing |= own;
        occupied.last_rows |= row_computes(last_rows, row) ? own : 0ull;
    }
    return occupied;
}

}  // namespace fastcar
