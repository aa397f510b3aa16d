// Decode session on an accelerator that runs whole steps, as fastcar_compile/runtime/backends/accelerator/step.py does it:
// the host embeds and samples, and a launch has a position of each row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "fastcar_accelerator.hpp"
#include "fastcar_library.hpp"
#include "fastcar_sampling.hpp"

namespace fastcar_host {

// One video at a time. Inputs are int64 [B, T] tokens, or float32 [B, T, W] embeddings.
class StepDecoder {
public:
    // `artifact`: check_files was called; it and `accelerator` have to outlive the decoder.
    // Throws Error: a file does not fit the decoder.
    StepDecoder(const Artifact& artifact, const DecoderSpec& spec, Accelerator& accelerator)
        : spec_(spec), accelerator_(accelerator), list_(static_cast<size_t>(spec.batch * spec.rows)) {
        if (!spec.embed.function.empty()) {
            const int64_t rows = spec.batch * spec.rows;
            given_ = spec.takes_embeddings ? make_tensor({rows, 1, spec.width}, "F32") : make_tensor({rows, 1}, "I64");
            position_ = make_tensor({spec.own_positions ? rows : 1}, "I64");
            embed_.emplace(load_machine(artifact, spec), spec.embed, load_params(artifact, spec, {spec.embed}));
            embed_->set({{spec.takes_embeddings ? "inputs_embeds" : "tokens", given_}, {"position", position_}});
        } else if (!spec.takes_embeddings) {
            throw Error("the artifact has no program `embed`", artifact.place(spec.library), "compile the model again");
        }
    }

    // Forget everything: caches, chains and position.
    void reset() {
        accelerator_.reset();
        progress_ = Progress();
        list_.assign(list_.size(), LaunchRow());
    }

    // Reads a prompt of `count` positions, as many per launch as a video has rows; the result is the last one's logits, float32 [B, V].
    Logits prefill(const void* inputs, int64_t count) {
        progress_.require_room(spec_, count);
        Logits logits;
        for (int64_t i = 0; i < count; i += spec_.rows) {
            const int64_t width = std::min(spec_.rows, count - i);
            logits = launch(inputs, i, count, width, false);
            logits.values += (width - 1) * logits.next;
            progress_.position += width;
        }
        return logits;
    }

    // A decode step of `width` positions of every video, of which `accept` says how many were right; float32 [B, width, V].
    Logits step(const void* inputs, int64_t width = 1) {
        progress_.require_room(spec_, width);
        return launch(inputs, 0, width, width, true);
    }

    // Goes on behind the first `count` positions of the last step; the next launch commits what they changed of replay.
    void accept(int64_t count) {
        progress_.replayed += accelerator_.replayed(count);
        progress_.move(count);
        for (size_t row = 0; row < list_.size(); ++row) {
            list_[row].before = spec_.rows > 1 && static_cast<int64_t>(row) % spec_.rows < count ? list_[row].step + 1 : 0;  // NO_STEP + 1 is 0
        }
    }

    double replay_ratio() const { return progress_.replay_ratio(spec_); }

private:
    // Positions `first` .. first + width of `count` of every video, of a prompt or of decode forwards.
    Logits launch(const void* inputs, int64_t first, int64_t count, int64_t width, bool decodes) {
        const size_t bytes = spec_.takes_embeddings ? sizeof(float) * static_cast<size_t>(spec_.width) : sizeof(int64_t);
        char* given = embed_.has_value() ? data_of<char>(given_) : reinterpret_cast<char*>(accelerator_.input());
        for (int64_t row = 0; row < spec_.batch * spec_.rows; ++row) {
            const int64_t ahead = row % spec_.rows, place = row / spec_.rows * count + first + ahead;
            LaunchRow& own = list_[static_cast<size_t>(row)];
            own.active = ahead < width;
            own.position = static_cast<uint32_t>(own.active ? progress_.position + ahead : 0);
            own.step = decodes && own.active ? static_cast<uint32_t>(progress_.step + ahead) : step::NO_STEP;
            if (own.active) {
                std::memcpy(given + static_cast<size_t>(row) * bytes, static_cast<const char*>(inputs) + static_cast<size_t>(place) * bytes, bytes);
            }
        }
        if (embed_.has_value()) {
            for (int64_t row = 0; row < position_.size(0); ++row) {
                data_of<int64_t>(position_)[row] = list_[static_cast<size_t>(row)].position;
            }
            const tvm::ffi::Array<tvm::ffi::Tensor> embedded = embed_->run();
            std::memcpy(accelerator_.input(), data_of<float>(embedded[0]), tvm::ffi::GetDataSize(embedded[0]));
        }
        accelerator_.run(list_);
        const int64_t stride = accelerator_.output_stride();
        return {accelerator_.output(), stride * spec_.rows, stride};
    }

    const DecoderSpec spec_;
    Accelerator& accelerator_;
    std::vector<LaunchRow> list_;  // of the last launch, and what the next one commits
    tvm::ffi::Tensor given_, position_;
    std::optional<Program> embed_;  // what the first layer reads, float32 [B, H]
    Progress progress_;
};

}  // namespace fastcar_host
