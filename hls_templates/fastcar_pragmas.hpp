// Loop and array pragmas of every FastCar kernel, in one place. Vitis HLS by default;
// FASTCAR_PRAGMAS_NONE leaves them out, and another tool's spelling is one more branch here.
#ifndef FASTCAR_PRAGMAS_HPP
#define FASTCAR_PRAGMAS_HPP

// Every loop that stays a loop has a label, which reports name.
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-label"
#endif

#if defined(FASTCAR_PRAGMAS_NONE)
#define FASTCAR_PRAGMA(text)
#else
#define FASTCAR_PRAGMA_TEXT(text) _Pragma(#text)
#define FASTCAR_PRAGMA(text) FASTCAR_PRAGMA_TEXT(text)
#endif

#define FASTCAR_DATAFLOW FASTCAR_PRAGMA(HLS DATAFLOW)
#define FASTCAR_INLINE FASTCAR_PRAGMA(HLS INLINE)
#define FASTCAR_NO_INLINE FASTCAR_PRAGMA(HLS INLINE off)
#define FASTCAR_PIPELINE(interval) FASTCAR_PRAGMA(HLS PIPELINE II = interval)
#define FASTCAR_UNROLL FASTCAR_PRAGMA(HLS UNROLL)
#define FASTCAR_TRIPS(least, most) FASTCAR_PRAGMA(HLS LOOP_TRIPCOUNT min = least max = most)
#define FASTCAR_PARTITION(array, dimension) FASTCAR_PRAGMA(HLS ARRAY_PARTITION variable = array type = complete dim = dimension)
#define FASTCAR_PARTITION_CYCLIC(array, dimension, banks) \
    FASTCAR_PRAGMA(HLS ARRAY_PARTITION variable = array type = cyclic factor = banks dim = dimension)
#define FASTCAR_RESHAPE(array, dimension) FASTCAR_PRAGMA(HLS ARRAY_RESHAPE variable = array type = complete dim = dimension)
#define FASTCAR_FIFO(name, entries) FASTCAR_PRAGMA(HLS STREAM variable = name depth = entries)
#define FASTCAR_BLOCKS(array, copies) FASTCAR_PRAGMA(HLS STREAM variable = array type = pipo depth = copies)
// Tiles are in UltraRAM where the design says so (fastcar_config.hpp, which comes first), else in block RAM.
#if defined(FASTCAR_TILES_IN_URAM)
#define FASTCAR_TILE_MEMORY(array) FASTCAR_PRAGMA(HLS BIND_STORAGE variable = array type = ram_2p impl = uram)
#else
#define FASTCAR_TILE_MEMORY(array) FASTCAR_PRAGMA(HLS BIND_STORAGE variable = array type = ram_2p impl = bram)
#endif
#define FASTCAR_MULTIPLY_IN_DSP(name) FASTCAR_PRAGMA(HLS BIND_OP variable = name op = mul impl = dsp)

#endif
