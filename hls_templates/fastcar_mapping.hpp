// Index Register and Mapping Registers of Dynamic Resource Scheduling (docs/reference/drs_table.md).
#ifndef FASTCAR_MAPPING_HPP
#define FASTCAR_MAPPING_HPP

#include <stdint.h>

#include "fastcar_ap_int.hpp"
#include "fastcar_pragmas.hpp"

namespace fastcar {

static const int INDEX_REGISTER_BITS = 32;

// ceil(log2(CORES)), at least one bit.
template <int CORES>
struct MappingBits {
    static const int VALUE = 1 + MappingBits<(CORES + 1) / 2>::VALUE;
};
template <>
struct MappingBits<2> {
    static const int VALUE = 1;
};
template <>
struct MappingBits<1> {
    static const int VALUE = 1;
};

inline bool row_computes(uint32_t index_register, int row) {
    FASTCAR_INLINE
    return ((index_register >> row) & 1u) != 0;
}

// Rows that compute go round-robin over the cores, in row order. Returns how many rows compute; replayed rows map to 0.
template <int BITS>
int map_rows(uint32_t index_register, int rows, int cores, ap_uint<BITS> mapping[INDEX_REGISTER_BITS]) {
    FASTCAR_INLINE
    int count = 0;
    int core = 0;
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_PIPELINE(1)
        const bool computes = row < rows && row_computes(index_register, row);
        mapping[row] = computes ? core : 0;
        if (computes) {
            ++count;
            core = core + 1 == cores ? 0 : core + 1;
        }
    }
    return count;
}

inline int count_rows(uint32_t index_register, int rows) {
    FASTCAR_INLINE
    int count = 0;
    for (int row = 0; row < INDEX_REGISTER_BITS; ++row) {
        FASTCAR_UNROLL
        count += row < rows && row_computes(index_register, row) ? 1 : 0;
    }
    return count;
}

// How many of `count` computing rows core `core` of `cores` gets.
inline int rows_of_core(int count, int core, int cores) {
    FASTCAR_INLINE
    return count / cores + (core < count % cores ? 1 : 0);
}

}  // namespace fastcar

#endif
