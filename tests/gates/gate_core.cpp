// The square root of fastcar_gate_core.hpp, for ctypes.
#include "fastcar_gate_core.hpp"

extern "C" void square_roots(const float* values, uint32_t count, float* roots) {
    for (uint32_t i = 0; i < count; ++i) {
        roots[i] = fastcar::gate::square_root(values[i]);
    }
}
