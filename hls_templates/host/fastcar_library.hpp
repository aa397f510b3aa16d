// The artifact's TVM library: its programs, and the tensors that they take.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "fastcar_artifact.hpp"
#include "fastcar_error.hpp"
#include "fastcar_program.hpp"
#include "fastcar_safetensors.hpp"

namespace fastcar_host {

// CPU memory, aligned as TVM's kernels want it, zero at first.
struct AlignedMemory {
    void AllocData(DLTensor* tensor) {
        const size_t alignment = 64;
        const size_t bytes = (tvm::ffi::GetDataSize(*tensor) + alignment - 1) / alignment * alignment;
        tensor->data = std::aligned_alloc(alignment, std::max(bytes, alignment));
        if (tensor->data == nullptr) throw std::bad_alloc();
        std::memset(tensor->data, 0, std::max(bytes, alignment));
    }
    void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

inline DLDataType tensor_type(const std::string& dtype) {
    static const std::map<std::string, DLDataType> types = {
        {"BOOL", {kDLBool, 8, 1}}, {"U8", {kDLUInt, 8, 1}},  {"I8", {kDLInt, 8, 1}},
        {"I16", {kDLInt, 16, 1}},  {"I32", {kDLInt, 32, 1}}, {"I64", {kDLInt, 64, 1}},
        {"F16", {kDLFloat, 16, 1}}, {"BF16", {kDLBfloat, 16, 1}}, {"F32", {kDLFloat, 32, 1}}, {"F64", {kDLFloat, 64, 1}}};
    const auto found = types.find(dtype);
    if (found == types.end()) throw Error("no tensor can have the type " + dtype, "", "compile the model again");
    return found->second;
}

inline tvm::ffi::Tensor make_tensor(const std::vector<int64_t>& shape, const std::string& dtype) {
    const tvm::ffi::ShapeView view(shape.data(), shape.size());
    return tvm::ffi::Tensor::FromNDAlloc(AlignedMemory(), view, tensor_type(dtype), DLDevice{kDLCPU, 0});
}

template <class T>
T* data_of(const tvm::ffi::Tensor& tensor) {
    return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

typedef std::map<std::string, tvm::ffi::Tensor> Tensors;

// TVM looks for the functions of an accelerator when it loads the library. Without one, nothing calls them.
inline void register_absent(const std::vector<std::string>& functions) {
    for (const std::string& name : functions) {
        if (!tvm::ffi::Function::GetGlobal(name).has_value()) {
            const auto refuse = [name](const tvm::ffi::AnyView*, int32_t, tvm::ffi::Any*) {
                throw Error(name + " is called without an accelerator", "", "decode with fastcar_board");
            };
            tvm::ffi::Function::SetGlobal(name, tvm::ffi::Function::FromPacked(refuse));
        }
    }
}

// The TVM virtual machine of the library. Throws Error: it cannot be loaded.
inline tvm::ffi::Module load_machine(const Artifact& artifact, const DecoderSpec& spec) {
    try {
        register_absent(spec.functions);
        // Module::LoadFromFile picks this loader by the ending of a file's name, and the sealed copy has no name.
        const tvm::ffi::Function load = tvm::ffi::Function::GetGlobalRequired("ffi.Module.load_from_file.so");
        const tvm::ffi::Module module = load(artifact.library(spec.library).path(), "so").cast<tvm::ffi::Module>();
        const tvm::ffi::Module machine = module->GetFunction("vm_load_executable").value()().cast<tvm::ffi::Module>();
        const int cpu = kDLCPU, device = 0, pooled = 2;
        machine->GetFunction("vm_initialization").value()(cpu, device, pooled);
        return machine;
    } catch (const std::exception& error) {
        throw Error(std::string("the library cannot be loaded: ") + error.what(), artifact.place(spec.library),
                    "use this folder's library on the CPU in its name, with the TVM of manifest.json");
    }
}

// One program of the library: its functions, and its arguments in their order.
class Program {
public:
    // Throws std::exception: the library has no such functions, or needs a parameter that `params` does not have.
    Program(const tvm::ffi::Module& machine, const ProgramSpec& spec, const Tensors& params)
        : spec_(spec), machine_(machine), run_(machine->GetFunction(spec.function).value()),
          check_(machine->GetFunction(spec.check).value()) {
        for (const std::string& name : spec.params) params_.push_back(params.at(name));
    }

    // Inputs by name, of the same shapes every time; the program keeps them. Throws std::exception: they do not fit it.
    void set(const Tensors& feeds) {
        inputs_.clear();
        for (const std::string& name : spec_.inputs) inputs_.push_back(feeds.at(name));
        arguments_.assign(inputs_.begin(), inputs_.end());
        arguments_.insert(arguments_.end(), params_.begin(), params_.end());
        if (!checked_) {  // kernels do not check what they are given
            tvm::ffi::Any result;
            check_.CallPacked(arguments_.data(), static_cast<int32_t>(arguments_.size()), &result);
            checked_ = true;
        }
    }

    // Results in their order, of the inputs that were set.
    tvm::ffi::Array<tvm::ffi::Tensor> run() {
        tvm::ffi::Any result;
        run_.CallPacked(arguments_.data(), static_cast<int32_t>(arguments_.size()), &result);
        return result.cast<tvm::ffi::Array<tvm::ffi::Tensor>>();
    }

    // Sets and runs; results by name.
    Tensors operator()(const Tensors& feeds) {
        set(feeds);
        const tvm::ffi::Array<tvm::ffi::Tensor> values = run();
        Tensors named;
        for (size_t i = 0; i < spec_.outputs.size(); ++i) {
            named.insert_or_assign(spec_.outputs[i], values[static_cast<int64_t>(i)]);
        }
        return named;
    }

private:
    ProgramSpec spec_;
    tvm::ffi::Module machine_;  // what run_ runs in
    tvm::ffi::Function run_, check_;
    bool checked_ = false;
    std::vector<tvm::ffi::Tensor> params_, inputs_;
    std::vector<tvm::ffi::AnyView> arguments_;  // they refer to inputs_ and params_
};

// The parameters of these programs, by name. Throws Error: one is missing, or the file is damaged.
inline Tensors load_params(const Artifact& artifact, const DecoderSpec& spec, const std::vector<ProgramSpec>& programs) {
    const Mapping& bytes = artifact.data(spec.weights);
    const Safetensors file(artifact.place(spec.weights), bytes.data(), bytes.bytes());
    Tensors params;
    for (const ProgramSpec& program : programs) {
        for (const std::string& name : program.params) {
            if (params.count(name) == 0) {
                const TensorInfo& info = file.info(name);
                const tvm::ffi::Tensor tensor = make_tensor(info.shape, info.dtype);
                file.read(name, 0, data_of<char>(tensor), info.bytes);
                params.emplace(name, tensor);
            }
        }
    }
    return params;
}

// Check the files of an artifact that a decoder uses, all of them before one is loaded. `more`: others, by name.
// Throws Error: one is missing or damaged.
inline void check_files(Artifact& artifact, const DecoderSpec& spec, std::vector<std::string> more = {}) {
    more.push_back(spec.weights);
    artifact.check(more, {spec.library});
}

}  // namespace fastcar_host
