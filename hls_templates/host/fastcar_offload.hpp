// The packed functions that the offload program calls, on an accelerator.
#pragma once

#include <tvm/ffi/any.h>
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

inline float float_of(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
}

// The float32 that a float16 is; a product with a power of two moves the exponent, and makes subnormals normal.
inline float from_half(uint16_t half) {
    const uint32_t magnitude = half & 0x7FFFu;
    const float number = float_of(magnitude << 13) * 5192296858534827628530496329220096.0f;  // 2^112
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    // Infinity or NaN, and the sign.
    return float_of(bits | (magnitude >= 0x7C00u ? 0x7F800000u : 0u) | (half & 0x8000u) << 16);
}

// Element i of an int8 row of `depth` mantissas: 32 of them share one of the exponents behind.
inline float from_block(const int8_t* row, int64_t depth, int64_t i) {
    const int32_t exponent = row[depth + i / 32];
    // -128 becomes minus infinity: times 0, a NaN.
    return static_cast<float>(row[i]) * float_of(static_cast<uint32_t>(exponent + 127) << 23);
}

// Row `row` of every head of a cache [B, kv_heads, length, ...] of any type, each of `depth` values:
// [B, kv_heads, depth].
inline std::vector<float> cache_row(const tvm::ffi::Tensor& cache, int64_t row, int64_t depth) {
    const int64_t heads = cache.size(0) * cache.size(1), length = cache.size(2), size = cache.size(3);
    const DLDataType type = cache.dtype();
    std::vector<float> values(static_cast<size_t>(heads * depth));
    for (int64_t head = 0; head < heads; ++head) {
        const int64_t first = (head * length + row) * size;
        for (int64_t i = 0; i < depth; ++i) {
            values[static_cast<size_t>(head * depth + i)] =
                type.bits == 8           ? from_block(data_of<int8_t>(cache) + first, depth, i)
                : type.bits == 32        ? data_of<float>(cache)[first + i]
                : type.code == kDLBfloat ? float_of(static_cast<uint32_t>(data_of<uint16_t>(cache)[first + i]) << 16)
                                         : from_half(data_of<uint16_t>(cache)[first + i]);
        }
    }
    return values;
}

// The values of a float32 tensor; null where the argument is none.
inline const float* floats_of(const tvm::ffi::Any& argument) {
    const auto tensor = argument.as<tvm::ffi::Tensor>();
    return tensor.has_value() ? data_of<float>(*tensor) : nullptr;
}

// `accelerator` has to outlive every step of the decoder.
inline void register_accelerator(Accelerator& accelerator) {
    using tvm::ffi::Any;
    using tvm::ffi::Function;
    using tvm::ffi::Tensor;
    const auto mlp = [&accelerator](const Tensor& x, const Tensor& replay, const Tensor& cached, int64_t layer,
                                    const Tensor& y) {
        accelerator.mlp(layer, data_of<float>(x), data_of<uint8_t>(replay), data_of<float>(cached), data_of<float>(y));
    };
    // What the gate does not read is the integer 0.
    const auto gate = [&accelerator](const Any& query, const Any& keys, const Any& x, const Any& cached, const Tensor& chain,
                                     const Tensor& position, const Tensor& step, int64_t stride, int64_t layer,
                                     const Tensor& replay, const Tensor& score, const Tensor& counted) {
        GateInputs inputs;
        std::vector<float> key;
        const auto q = query.as<Tensor>(), cache = keys.as<Tensor>();
        if (q.has_value() && cache.has_value()) {
            const int64_t earlier = std::max<int64_t>(*data_of<int64_t>(position) - stride, 0);
            key = cache_row(*cache, earlier, q->size(3));
            inputs.query = data_of<float>(*q);
            inputs.keys = key.data();
            inputs.heads = q->size(1);
            inputs.kv_heads = cache->size(1);
            inputs.depth = q->size(3);
        }
        inputs.x = floats_of(x);
        inputs.cached = floats_of(cached);
        inputs.chain = data_of<int32_t>(chain);
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
