// The packed functions that the offload library calls, on an accelerator.
#ifndef FASTCAR_OFFLOAD_HPP
#define FASTCAR_OFFLOAD_HPP

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "fastcar_accelerator.hpp"
#include "fastcar_decoder.hpp"

namespace fastcar_host {

// The float32 that a float16 is; a product with a power of two moves the exponent, and makes subnormals normal.
inline float from_half(uint16_t half) {
    const uint32_t magnitude = half & 0x7FFFu, shifted = magnitude << 13;
    float number;
    std::memcpy(&number, &shifted, sizeof(number));
    number *= 5192296858534827628530496329220096.0f;  // 2^112
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    bits |= (magnitude >= 0x7C00u ? 0x7F800000u : 0u) | (half & 0x8000u) << 16;  // infinity or NaN, and the sign
    std::memcpy(&number, &bits, sizeof(number));
    return number;
}

// Row `row` of every head of a cache float32 or float16 [B, kv_heads, length, depth]: [B, kv_heads, depth].
inline std::vector<float> cache_row(const tvm::ffi::Tensor& cache, int64_t row) {
    const int64_t heads = cache.size(0) * cache.size(1), length = cache.size(2), depth = cache.size(3);
    const bool half = cache.dtype().bits == 16;
    std::vector<float> values(static_cast<size_t>(heads * depth));
    for (int64_t head = 0; head < heads; ++head) {
        const int64_t first = (head * length + row) * depth;
        for (int64_t i = 0; i < depth; ++i) {
            values[static_cast<size_t>(head * depth + i)] =
                half ? from_half(data_of<uint16_t>(cache)[first + i]) : data_of<float>(cache)[first + i];
        }
    }
    return values;
}

// `accelerator` has to outlive every step of the decoder.
inline void register_accelerator(Accelerator& accelerator) {
    using tvm::ffi::Function;
    using tvm::ffi::Tensor;
    const auto mlp = [&accelerator](const Tensor& x, const Tensor&, const Tensor& cached, int64_t layer, const Tensor& y) {
        accelerator.mlp(layer, data_of<float>(x), data_of<float>(cached), data_of<float>(y));
    };
    const auto gate = [&accelerator](const Tensor& query, const Tensor& keys, const Tensor& chain, const Tensor& position,
                                     const Tensor& step, int64_t stride, int64_t layer, const Tensor& replay,
                                     const Tensor& score, const Tensor& counted) {
        GateInputs inputs;
        inputs.query = data_of<float>(query);
        const std::vector<float> key = cache_row(keys, std::max<int64_t>(*data_of<int64_t>(position) - stride, 0));
        inputs.keys = key.data();
        inputs.chain = data_of<int32_t>(chain);
        inputs.heads = query.size(1);
        inputs.kv_heads = keys.size(1);
        inputs.depth = keys.size(3);
        inputs.step = *data_of<int64_t>(step);
        accelerator.gate(layer, inputs, data_of<uint8_t>(replay), data_of<float>(score), data_of<int32_t>(counted));
    };
    const auto linear = [&accelerator](const Tensor& x, const tvm::ffi::String& name, const Tensor& y) {
        accelerator.linear(name, data_of<float>(x), data_of<float>(y));
    };
    Function::SetGlobal(MLP_FUNCTION, Function::FromTyped(mlp), true);
    Function::SetGlobal(GATE_FUNCTION, Function::FromTyped(gate), true);
    Function::SetGlobal(LINEAR_FUNCTION, Function::FromTyped(linear), true);
}

}  // namespace fastcar_host

#endif
