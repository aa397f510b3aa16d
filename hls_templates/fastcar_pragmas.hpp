// ap_int.h for g++ too, and the loop and array pragmas of every FastCar kernel, in one place.
#pragma once

// The simulation header's default constructor masks a value it has not set yet; g++ reports that wherever it is inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <ap_int.h>

// Every loop that stays a loop has a label, which reports name. One without a label is of constant bounds and below a pipelined
// loop: Vitis HLS unrolls it by itself (UG1399, "Pipelining Loops").
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-label"
#endif

#define FASTCAR_PRAGMA_TEXT(text) _Pragma(#text)
#define FASTCAR_PRAGMA(text) FASTCAR_PRAGMA_TEXT(text)

// Stands in the body of an unrolled loop that is not below a pipelined one, for Vitis HLS.
#define FASTCAR_UNROLLED FASTCAR_PRAGMA(HLS UNROLL)
#define FASTCAR_DATAFLOW FASTCAR_PRAGMA(HLS DATAFLOW)
#define FASTCAR_INLINE FASTCAR_PRAGMA(HLS INLINE)
#define FASTCAR_NO_INLINE FASTCAR_PRAGMA(HLS INLINE off)
// The additions of this function keep their order. Vitis HLS makes a balanced tree of integer additions by itself (UG1399), and
// a tree of products is added in the fabric, not over the cascade of the DSP slices.
#define FASTCAR_IN_ORDER FASTCAR_PRAGMA(HLS EXPRESSION_BALANCE off)
#define FASTCAR_PIPELINE(interval) FASTCAR_PRAGMA(HLS PIPELINE II = interval)
#define FASTCAR_TRIPS(least, most) FASTCAR_PRAGMA(HLS LOOP_TRIPCOUNT min = least max = most)
// What a pipelined loop reads `iterations` after it wrote it; design/recurrences.py compares this with the latency.
#define FASTCAR_RECURRENCE(name, iterations) \
    FASTCAR_PRAGMA(HLS DEPENDENCE variable = name type = inter direction = RAW distance = iterations dependent = true)
// No iteration of a pipelined loop reads what another one wrote: they are in different places or words.
#define FASTCAR_INDEPENDENT(name) FASTCAR_PRAGMA(HLS DEPENDENCE variable = name type = inter dependent = false)
#define FASTCAR_PARTITION(array, dimension) FASTCAR_PRAGMA(HLS ARRAY_PARTITION variable = array type = complete dim = dimension)
#define FASTCAR_PARTITION_CYCLIC(array, dimension, banks) \
    FASTCAR_PRAGMA(HLS ARRAY_PARTITION variable = array type = cyclic factor = banks dim = dimension)
#define FASTCAR_RESHAPE(array, dimension) FASTCAR_PRAGMA(HLS ARRAY_RESHAPE variable = array type = complete dim = dimension)
// All members of a struct as one wide value: they are read and written at once.
#define FASTCAR_AGGREGATE(name) FASTCAR_PRAGMA(HLS AGGREGATE variable = name)
#define FASTCAR_FIFO(name, entries) FASTCAR_PRAGMA(HLS STREAM variable = name depth = entries)
#define FASTCAR_BLOCKS(array, copies) FASTCAR_PRAGMA(HLS STREAM variable = array type = pipo depth = copies)
#define FASTCAR_BLOCK_RAM(array) FASTCAR_PRAGMA(HLS BIND_STORAGE variable = array type = ram_2p impl = bram)
// Tiles are in UltraRAM where the design says so (fastcar_config.hpp, which comes first), else in block RAM. UltraRAM has
// no initial values: a static array, which C++ sets to zero, must not be bound to it.
#if defined(FASTCAR_TILES_IN_URAM)
#define FASTCAR_TILE_MEMORY(array) FASTCAR_PRAGMA(HLS BIND_STORAGE variable = array type = ram_2p impl = uram)
#else
#define FASTCAR_TILE_MEMORY(array) FASTCAR_BLOCK_RAM(array)
#endif
// The same of rows and neurons before they are quantised.
#if defined(FASTCAR_VALUES_IN_URAM)
#define FASTCAR_VALUE_MEMORY(array) FASTCAR_PRAGMA(HLS BIND_STORAGE variable = array type = ram_2p impl = uram)
#else
#define FASTCAR_VALUE_MEMORY(array) FASTCAR_BLOCK_RAM(array)
#endif
// The same of rows on chip, and of the FIFOs in which the weights of a step wait (fastcar_step_config.hpp).
#if defined(FASTCAR_ROWS_IN_URAM)
#define FASTCAR_ROW_MEMORY(array) FASTCAR_PRAGMA(HLS BIND_STORAGE variable = array type = ram_2p impl = uram)
#define FASTCAR_FIFO_MEMORY(name) FASTCAR_PRAGMA(HLS BIND_STORAGE variable = name type = fifo impl = uram)
#else
#define FASTCAR_ROW_MEMORY(array) FASTCAR_BLOCK_RAM(array)
#define FASTCAR_FIFO_MEMORY(name) FASTCAR_PRAGMA(HLS BIND_STORAGE variable = name type = fifo impl = bram)
#endif
// Stands before a large array without state. C simulation has no room for it on the stack.
#if defined(__SYNTHESIS__)
#define FASTCAR_SCRATCH
#else
#define FASTCAR_SCRATCH static
#endif
