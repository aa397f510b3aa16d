// Decode session on the artifact's TVM library, as fastcar_compile/runtime/session.py and backends/cpu.py do it:
// prefill in chunks without replay, then one forward per token; state is updated in place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fastcar_library.hpp"
#include "fastcar_sampling.hpp"

namespace fastcar_host {

// One video at a time. Inputs are int64 [B, T] tokens, or float32 [B, T, H] of a headless decoder.
class Decoder {
public:
    // `artifact`: check_files was called; it has to outlive the decoder. `offload`: decode through the program whose MLPs are
    // on the accelerator. Throws Error: a file does not fit the decoder.
    Decoder(const Artifact& artifact, const DecoderSpec& spec, bool offload)
        : spec_(spec), params_(load_params(artifact, spec, {offload ? spec.offload : spec.decode, spec.prefill})),
          machine_(load_machine(artifact, spec)), decode_(machine_, offload ? spec.offload : spec.decode, params_) {
        const char* lacking = spec.cross_attention ? "the decoder has cross-attention, and this program cannot set its context"
                              : spec.own_positions ? "the rows of this decoder have positions of their own, and this program gives all rows one"
                                                   : nullptr;
        if (lacking != nullptr) {
            throw Error(lacking, "", "decode from Python: session(backend=\"board\") or session(backend=\"cpu\")");
        }
        if (spec.prefill_chunk > 0) prefill_.emplace_back(machine_, spec.prefill, params_);
        reset();
    }

    // Forget everything: caches, chains and position.
    void reset() {
        for (const StateSpec& state : spec_.state) {
            state_.insert_or_assign(state.name, make_tensor(state.shape, state.dtype));
        }
        progress_ = Progress();
    }

    // Reads a prompt of `count` positions; the result is the last position's logits, float32 [B, V].
    Logits prefill(const void* inputs, int64_t count) {
        const int64_t chunk = prefill_.empty() ? 1 : spec_.prefill_chunk;
        progress_.require_room(spec_, count);
        Logits logits;
        for (int64_t start = 0; start < count; start += chunk) {
            const int64_t used = std::min(chunk, count - start);
            Tensors feeds = this->feeds(inputs, start, used, count, chunk);
            logits = last(prefill_.empty() ? prompt_step(feeds) : prefill_.front()(feeds), used - 1);
        }
        progress_.position = count;
        return logits;
    }

    // One decode forward of one position per row; float32 [B, V]. `accept` follows.
    Logits step(const void* inputs, int64_t = 1) {
        progress_.require_room(spec_, 1);
        Tensors feeds = this->feeds(inputs, 0, 1, 1, 1);
        add_gate(feeds, progress_.step, spec_.thresholds);
        const Tensors results = decode_(feeds);
        const auto decisions = results.find("decisions");
        if (decisions != results.end()) {
            const uint8_t* flags = data_of<uint8_t>(decisions->second);
            progress_.replayed += std::count_if(flags, flags + spec_.layers * spec_.batch, [](uint8_t f) { return f != 0; });
        }
        return last(results, 0);
    }

    // Goes on behind the last step.
    void accept(int64_t count) { progress_.move(count); }

    double replay_ratio() const { return progress_.replay_ratio(spec_); }

private:
    // State and inputs: positions start .. start + used of `count`, padded with zeros to `width`.
    Tensors feeds(const void* inputs, int64_t start, int64_t used, int64_t count, int64_t width) const {
        const size_t element = spec_.takes_embeddings ? sizeof(float) * static_cast<size_t>(spec_.width) : sizeof(int64_t);
        std::vector<int64_t> shape = {spec_.batch, width};
        if (spec_.takes_embeddings) shape.push_back(spec_.width);
        const tvm::ffi::Tensor value = make_tensor(shape, spec_.takes_embeddings ? "F32" : "I64");
        for (int64_t row = 0; row < spec_.batch; ++row) {
            std::memcpy(data_of<char>(value) + element * static_cast<size_t>(row * width),
                        static_cast<const char*>(inputs) + element * static_cast<size_t>(row * count + start),
                        element * static_cast<size_t>(used));
        }
        Tensors feeds = state_;
        feeds.insert_or_assign(spec_.takes_embeddings ? "inputs_embeds" : "tokens", value);
        feeds.insert_or_assign("position", scalar(progress_.position + start));
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

    Logits last(const Tensors& results, int64_t position) {
        const tvm::ffi::Tensor& logits = results.at("logits");
        const int64_t width = logits.size(1), depth = logits.size(2);
        logits_.clear();
        for (int64_t row = 0; row < spec_.batch; ++row) {
            const float* first = data_of<float>(logits) + (row * width + position) * depth;
            logits_.insert(logits_.end(), first, first + depth);
        }
        return {logits_.data(), depth, 0};
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
    Progress progress_;
    std::vector<float> logits_;
};

}  // namespace fastcar_host
