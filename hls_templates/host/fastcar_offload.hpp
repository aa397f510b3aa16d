// The packed functions that the offload library calls, on an accelerator.
#ifndef FASTCAR_OFFLOAD_HPP
#define FASTCAR_OFFLOAD_HPP

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdint>

#include "fastcar_accelerator.hpp"
#include "fastcar_decoder.hpp"

namespace fastcar_host {

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
        inputs.keys = data_of<float>(keys);
        inputs.chain = data_of<int32_t>(chain);
        inputs.heads = query.size(1);
        inputs.kv_heads = keys.size(1);
        inputs.length = keys.size(2);
        inputs.depth = keys.size(3);
        inputs.key_row = std::max<int64_t>(*data_of<int64_t>(position) - stride, 0);
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
