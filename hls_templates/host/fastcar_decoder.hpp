// Decode session on the artifact's TVM library, as fastcar_compile/runtime/session.py and backends/cpu.py do it:
// prefill in chunks without replay, then one forward per token; state is updated in place.
#ifndef FASTCAR_DECODER_HPP
#define FASTCAR_DECODER_HPP

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
        if (tensor->data == nullptr) {
            throw std::bad_alloc();
        }
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
    if (found == types.end()) {
        throw Error("no tensor can have the type " + dtype, "", "compile the model again");
    }
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

// One program of the library: its functions and the order of their arguments.
class Program {
public:
    // Throws std::exception: the library has no such functions, or needs a parameter that `params` does not have.
    Program(const tvm::ffi::Module& machine, const ProgramSpec& spec, const Tensors& params)
        : spec_(spec), machine_(machine), run_(machine->GetFunction(spec.function).value()),
          check_(machine->GetFunction(spec.check).value()) {
        for (const std::string& name : spec.params) {
            params_.push_back(params.at(name));
        }
    }

    // Results by name; the feeds of all calls have the same shapes. Throws std::exception: they do not fit the program.
    Tensors operator()(const Tensors& feeds) {
        std::vector<tvm::ffi::AnyView> arguments;
        for (const std::string& name : spec_.inputs) {
            arguments.push_back(feeds.at(name));
        }
        arguments.insert(arguments.end(), params_.begin(), params_.end());
        tvm::ffi::Any result;
        if (!checked_) {  // kernels do not check what they are given
            check_.CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
            checked_ = true;
        }
        run_.CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
        const auto values = result.cast<tvm::ffi::Array<tvm::ffi::Tensor>>();
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
    std::vector<tvm::ffi::Tensor> params_;
};

// One video at a time. Inputs are int64 [B, T] tokens, or float32 [B, T, H] of a headless decoder.
class Decoder {
public:
    // `artifact`: check_files was called; it has to outlive the decoder. `offload`: decode through the program whose MLPs are
    // on the accelerator. Throws Error: a file does not fit the decoder.
    Decoder(const Artifact& artifact, const DecoderSpec& spec, bool offload)
        : spec_(spec), params_(load_params(artifact, spec, offload)), machine_(load_machine(artifact, spec)),
          decode_(machine_, offload ? spec.offload : spec.decode, params_), replayed_(0) {
        if (spec.cross_attention) {
            throw Error("the decoder has cross-attention, and this program cannot set its context", "",
                        "decode from Python: session(backend=\"board\") or session(backend=\"cpu\")");
        }
        if (spec.prefill_chunk > 0) {
            prefill_.emplace_back(machine_, spec.prefill, params_);
        }
        reset();
    }

    // Check the files of an artifact that the decoder uses, all of them before one is loaded. `more`: others, by name.
    // Throws Error: one is missing or damaged.
    static void check_files(Artifact& artifact, const DecoderSpec& spec, std::vector<std::string> more = {}) {
        more.push_back(spec.weights);
        artifact.check(more, {spec.library});
    }

    // Forget everything: caches, chains and position.
    void reset() {
        for (const StateSpec& state : spec_.state) {
            state_.insert_or_assign(state.name, make_tensor(state.shape, state.dtype));
        }
        position_ = step_ = replayed_ = 0;
    }

    // Reads a prompt of `count` positions; the result is the last position's logits, float32 [B, V].
    std::vector<float> prefill(const void* inputs, int64_t count) {
        const int64_t chunk = prefill_.empty() ? 1 : spec_.prefill_chunk;
        require_room(count);
        std::vector<float> logits;
        for (int64_t start = 0; start < count; start += chunk) {
            const int64_t used = std::min(chunk, count - start);
            Tensors feeds = this->feeds(inputs, start, used, count, chunk);
            logits = last(prefill_.empty() ? prompt_step(feeds) : prefill_.front()(feeds), used - 1);
        }
        position_ = count;
        return logits;
    }

    // One decode forward of one position per row; float32 [B, V].
    std::vector<float> step(const void* inputs) {
        require_room(1);
        Tensors feeds = this->feeds(inputs, 0, 1, 1, 1);
        add_gate(feeds, step_, spec_.thresholds);
        const Tensors results = decode_(feeds);
        const auto decisions = results.find("decisions");
        if (decisions != results.end()) {
            const uint8_t* flags = data_of<uint8_t>(decisions->second);
            replayed_ += std::count_if(flags, flags + spec_.layers * spec_.batch, [](uint8_t f) { return f != 0; });
        }
        ++position_;
        ++step_;
        return last(results, 0);
    }

    // Greedy tokens [B][count] from a prompt int64 [B][P]. Throws Error: they do not fit, or there is no vocabulary.
    std::vector<std::vector<int64_t>> generate(const std::vector<std::vector<int64_t>>& prompt, int64_t count) {
        check_prompt(prompt, count);
        reset();
        std::vector<int64_t> flat;
        for (const auto& row : prompt) {
            flat.insert(flat.end(), row.begin(), row.end());
        }
        std::vector<std::vector<int64_t>> tokens(prompt.size());
        std::vector<float> logits = prefill(flat.data(), static_cast<int64_t>(prompt.front().size()));
        for (int64_t i = 0; i < count; ++i) {
            std::vector<int64_t> next;
            for (int64_t row = 0; row < spec_.batch; ++row) {
                const auto first = logits.begin() + row * spec_.vocab;
                next.push_back(std::max_element(first, first + spec_.vocab) - first);
                tokens[static_cast<size_t>(row)].push_back(next.back());
            }
            if (i + 1 < count) {
                logits = step(next.data());
            }
        }
        return tokens;
    }

    // Share of (forward, layer, row) that replayed.
    double replay_ratio() const {
        const int64_t all = step_ * spec_.layers * spec_.batch;
        return all == 0 ? 0.0 : static_cast<double>(replayed_) / static_cast<double>(all);
    }

private:
    static Tensors load_params(const Artifact& artifact, const DecoderSpec& spec, bool offload) {
        const Mapping& bytes = artifact.data(spec.weights);
        const Safetensors file(artifact.place(spec.weights), bytes.data(), bytes.bytes());
        Tensors params;
        std::vector<std::string> names = offload ? spec.offload.params : spec.decode.params;
        names.insert(names.end(), spec.prefill.params.begin(), spec.prefill.params.end());
        for (const std::string& name : names) {
            if (params.count(name) == 0) {
                const TensorInfo& info = file.info(name);
                const tvm::ffi::Tensor tensor = make_tensor(info.shape, info.dtype);
                file.read(name, 0, data_of<char>(tensor), info.bytes);
                params.emplace(name, tensor);
            }
        }
        return params;
    }

    void require_room(int64_t count) const {
        if (position_ + count > spec_.max_seq_len) {
            throw Error(std::to_string(position_) + " + " + std::to_string(count) + " tokens do not fit max_seq_len " +
                            std::to_string(spec_.max_seq_len),
                        "", "ask for fewer tokens, or compile with a larger max_seq_len");
        }
    }

    void check_prompt(const std::vector<std::vector<int64_t>>& prompt, int64_t count) const {
        if (spec_.takes_embeddings) {
            throw Error("a headless decoder has no tokens to sample", "", "call prefill() and step() with embeddings");
        }
        if (static_cast<int64_t>(prompt.size()) != spec_.batch || prompt.front().empty()) {
            throw Error("the prompt has " + std::to_string(prompt.size()) + " row(s)", "",
                        "give " + std::to_string(spec_.batch) + " of one length, at least one token each");
        }
        for (const auto& row : prompt) {
            if (row.size() != prompt.front().size()) {
                throw Error("the rows of the prompt have different lengths", "", "give as many tokens for every row");
            }
            for (const int64_t token : row) {
                if (token < 0 || token >= spec_.vocab) {
                    throw Error("token " + std::to_string(token) + " is outside the vocabulary of " +
                                    std::to_string(spec_.vocab),
                                "", "use ids 0 .. " + std::to_string(spec_.vocab - 1));
                }
            }
        }
        const int64_t length = static_cast<int64_t>(prompt.front().size()) + count - 1;
        if (count < 1 || length > spec_.max_seq_len) {
            throw Error(std::to_string(prompt.front().size()) + " prompt tokens and " + std::to_string(count) +
                            " new ones do not fit max_seq_len " + std::to_string(spec_.max_seq_len),
                        "", "ask for fewer tokens");
        }
    }

    // State and inputs: positions start .. start + used of `count`, padded with zeros to `width`.
    Tensors feeds(const void* inputs, int64_t start, int64_t used, int64_t count, int64_t width) const {
        const size_t element = spec_.takes_embeddings ? sizeof(float) * static_cast<size_t>(spec_.hidden) : sizeof(int64_t);
        std::vector<int64_t> shape = {spec_.batch, width};
        if (spec_.takes_embeddings) {
            shape.push_back(spec_.hidden);
        }
        const tvm::ffi::Tensor value = make_tensor(shape, spec_.takes_embeddings ? "F32" : "I64");
        for (int64_t row = 0; row < spec_.batch; ++row) {
            std::memcpy(data_of<char>(value) + element * static_cast<size_t>(row * width),
                        static_cast<const char*>(inputs) + element * static_cast<size_t>(row * count + start),
                        element * static_cast<size_t>(used));
        }
        Tensors feeds = state_;
        feeds.insert_or_assign(spec_.takes_embeddings ? "inputs_embeds" : "tokens", value);
        feeds.insert_or_assign("position", scalar(position_ + start));
        return feeds;
    }

    void add_gate(Tensors& feeds, int64_t step, const std::vector<float>& thresholds) const {
        const tvm::ffi::Tensor limits = make_tensor({spec_.layers}, "F32");
        std::copy(thresholds.begin(), thresholds.end(), data_of<float>(limits));
        feeds.insert_or_assign("step", scalar(step));
        feeds.insert_or_assign("thresholds", limits);
    }

    // Without a prefill program: decode forward number 0, which never replays and writes slot 0 only; that is put back.
    Tensors prompt_step(Tensors& feeds) {
        add_gate(feeds, 0, std::vector<float>(static_cast<size_t>(spec_.layers), INFINITY));
        std::map<std::string, std::vector<char>> kept;
        for (const StateSpec& state : spec_.state) {
            if (state.replay) {
                const tvm::ffi::Tensor& tensor = state_.at(state.name);
                const char* bytes = data_of<char>(tensor);
                const size_t slot = tvm::ffi::GetDataSize(tensor) / static_cast<size_t>(tensor.size(0));
                kept.emplace(state.name, std::vector<char>(bytes, bytes + slot));
            }
        }
        const Tensors results = decode_(feeds);
        for (const auto& entry : kept) {
            std::memcpy(data_of<char>(state_.at(entry.first)), entry.second.data(), entry.second.size());
        }
        return results;
    }

    std::vector<float> last(const Tensors& results, int64_t position) const {
        const tvm::ffi::Tensor& logits = results.at("logits");
        const int64_t width = logits.size(1), depth = logits.size(2);
        std::vector<float> values;
        for (int64_t row = 0; row < spec_.batch; ++row) {
            const float* first = data_of<float>(logits) + (row * width + position) * depth;
            values.insert(values.end(), first, first + depth);
        }
        return values;
    }

    static tvm::ffi::Tensor scalar(int64_t value) {
        const tvm::ffi::Tensor tensor = make_tensor({1}, "I64");
        *data_of<int64_t>(tensor) = value;
        return tensor;
    }

    DecoderSpec spec_;
    Tensors params_;
    tvm::ffi::Module machine_;
    Program decode_;
    std::vector<Program> prefill_;  // one or none
    Tensors state_;
    int64_t position_ = 0;
    int64_t step_ = 0;
    int64_t replayed_;
};

}  // namespace fastcar_host

#endif
