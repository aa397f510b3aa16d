// Decode session on an accelerator that runs whole steps, as fastcar_compile/runtime/backends/accelerator/step.py does it:
// the host embeds and samples, and a position is a launch.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "fastcar_accelerator.hpp"
#include "fastcar_library.hpp"
#include "fastcar_sampling.hpp"

namespace fastcar_host {

// The library's program `embed`, with its arguments in place.
class Embedding {
public:
    // Throws Error: the library or its weights do not fit, or it has no such program.
    Embedding(const Artifact& artifact, const DecoderSpec& spec)
        : given_(spec.takes_embeddings ? make_tensor({spec.batch, 1, spec.width}, "F32") : make_tensor({spec.batch, 1}, "I64")), position_(make_tensor({1}, "I64")),
          bytes_(sizeof(float) * static_cast<size_t>(spec.batch * spec.hidden)), program_(open(artifact, spec)) {
        program_.set({{spec.takes_embeddings ? "inputs_embeds" : "tokens", given_}, {"position", position_}});
    }

    // The inputs of every row go here: tokens int64 [B], or embeddings float32 [B, W].
    char* input() const { return data_of<char>(given_); }

    // What the first layer reads of them at `position`: float32 [B, H].
    void embed(int64_t position, float* rows) {
        *data_of<int64_t>(position_) = position;
        const tvm::ffi::Array<tvm::ffi::Tensor> results = program_.run();
        std::memcpy(rows, data_of<float>(results[0]), bytes_);
    }

private:
    static Program open(const Artifact& artifact, const DecoderSpec& spec) {
        if (spec.embed.function.empty()) {
            throw Error("the artifact has no program `embed`", artifact.place(spec.library), "compile the model again");
        }
        return Program(load_machine(artifact, spec), spec.embed, load_params(artifact, spec, {spec.embed}));
    }

    tvm::ffi::Tensor given_, position_;
    size_t bytes_;
    Program program_;
};

// One video at a time. Inputs are int64 [B, T] tokens, or float32 [B, T, W] embeddings.
class StepDecoder {
public:
    // `artifact`: check_files was called; it and `accelerator` have to outlive the decoder.
    // Throws Error: a file does not fit the decoder.
    StepDecoder(const Artifact& artifact, const DecoderSpec& spec, Accelerator& accelerator)
        : spec_(spec), accelerator_(accelerator) {
        if (!spec.takes_embeddings || !spec.embed.function.empty()) {
            embedding_.emplace(artifact, spec);
        }
    }

    // Forget everything: caches, chains and position.
    void reset() {
        accelerator_.reset();
        progress_ = Progress();
    }

    // Reads a prompt of `count` positions, one per launch; the result is the last one's logits, float32 [B, V].
    Logits prefill(const void* inputs, int64_t count) {
        progress_.require_room(spec_, count);
        for (int64_t i = 0; i < count; ++i) {
            give(inputs, i, count);
            accelerator_.run(progress_.position++, step::NO_STEP);
        }
        return logits();
    }

    // One decode forward of one position per row; float32 [B, V].
    Logits step(const void* inputs) {
        progress_.require_room(spec_, 1);
        give(inputs, 0, 1);
        accelerator_.run(progress_.position++, static_cast<uint32_t>(progress_.step++));
        progress_.replayed += accelerator_.replayed();
        return logits();
    }

    // Greedy tokens; see generate in fastcar_sampling.hpp.
    std::vector<std::vector<int64_t>> generate(const std::vector<std::vector<int64_t>>& prompt, int64_t count) {
        return fastcar_host::generate(*this, spec_, prompt, count);
    }

    double replay_ratio() const { return progress_.replay_ratio(spec_); }

private:
    Logits logits() { return {accelerator_.output(), accelerator_.output_stride()}; }

    // The accelerator's input: position `i` of `count` of every row.
    void give(const void* inputs, int64_t i, int64_t count) {
        const size_t bytes = spec_.takes_embeddings ? sizeof(float) * static_cast<size_t>(spec_.width) : sizeof(int64_t);
        char* given = embedding_.has_value() ? embedding_->input() : reinterpret_cast<char*>(accelerator_.input());
        for (size_t row = 0; row < static_cast<size_t>(spec_.batch); ++row) {
            const size_t place = row * static_cast<size_t>(count) + static_cast<size_t>(i);
            std::memcpy(given + row * bytes, static_cast<const char*>(inputs) + place * bytes, bytes);
        }
        if (embedding_.has_value()) {
            embedding_->embed(progress_.position, accelerator_.input());
        }
    }

    const DecoderSpec spec_;
    Accelerator& accelerator_;
    std::optional<Embedding> embedding_;
    Progress progress_;
};

}  // namespace fastcar_host
