// ap_int.h, for g++ too.
#pragma once

// The simulation header's default constructor masks a value it has not set yet; g++ reports that wherever it is inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <ap_int.h>
