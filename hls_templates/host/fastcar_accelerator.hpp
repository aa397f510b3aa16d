// The accelerator of one decoder: one kernel that keeps its program and control table. A launch runs the instructions from an
// entry up to an END: a whole decode step, or one decision, MLP or linear. Weights, caches and buffers stay on the device. The same
// steps as fastcar_compile/runtime/backends/accelerator/kernel.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fastcar_artifact.hpp"
#include "fastcar_format.hpp"
#include "fastcar_program.hpp"
#include "fastcar_safetensors.hpp"
#include "fastcar_xrt.hpp"

namespace fastcar_host {

namespace drs = fastcar::drs;
namespace step = fastcar::step;

// 32-bit words of the report: what became of the launch, and behind them the controller's answers.
enum Report { STATUS = 0, INSTRUCTION = 1, ANSWERS = 4 };

static const uint32_t ALL_ROWS = 0xFFFFFFFFu;

// A row of a launch. before: see Rows of codegen/hls/step_program/cache_layout.py.
struct LaunchRow {
    uint32_t position = 0, step = step::NO_STEP;
    bool active = false;
    uint32_t before = 0;
};

// What a gate is decided on: q float32 [B, heads, depth]; the key of position - F, float32 [B, kv_heads, depth]; the MLP's
// input and that of the slot's last computed visit, float32 [B, H]; replays in a row, int32 [B]. Null: the gate does not read
// it.
struct GateInputs {
    const float* query = nullptr;
    const float* keys = nullptr;
    const float* x = nullptr;
    const float* cached = nullptr;
    const int32_t* chain = nullptr;
    int64_t heads = 0;
    int64_t kv_heads = 0;
    int64_t depth = 1;
    int64_t step = 0;
};

class Accelerator {
public:
    // `meminfo`: says how much contiguous memory is free, on a board whose memory is also Linux's.
    // `artifact`: the design's weights and table were checked.
    // Throws Error: no device, an xclbin of another design, too little memory, or files that do not fit the design.
    Accelerator(const Artifact& artifact, const DecoderSpec& decoder, const std::string& xclbin, unsigned device,
                const std::string& meminfo)
        : spec_(accelerator_spec()), batch_(decoder.batch * decoder.rows), own_(decoder.rows), hidden_(decoder.hidden), device_(device, xclbin, kernel_specs()),
          kernel_(device_, kernel_specs()) {
        const Mapping& table = artifact.data(spec_.table);
        read_program(table, artifact.place(spec_.table), decoder);
        if (spec_.shared_memory) require_contiguous(buffer_bytes(), meminfo);
        load_weights(artifact);
        for (const ArgumentSpec& argument : kernel_spec().arguments) {
            if (argument.kind == Kind::SCALAR) kernel_.set(argument.name, 0u);
        }
        entry_ = kernel_.scalar<uint32_t>("entry");
        input_ = kernel_.map("inputs");
        output_ = kernel_.map("outputs");
        report_ = kernel_.map("step_report");
        for (const ArgumentSpec& argument : kernel_spec().arguments) {
            if (argument.name == "replay" || argument.name.rfind("cache_", 0) == 0) {
                kept_.push_back(kernel_.map(argument.name));
            }
        }
        reset();
        load(table, artifact.place(spec_.table));
        kernel_.set("op", static_cast<uint32_t>(step::RUN));
    }

    Accelerator(const Accelerator&) = delete;  // the compute unit refers to the device
    Accelerator& operator=(const Accelerator&) = delete;

    // Before another video: keys, values and everything of replay are 0.
    void reset() {
        for (Mapped& buffer : kept_) buffer.clear();
    }

    // ---- whole steps

    // The rows of the next launch, float32 [B, H]: what is written here is what `run` gives the kernel.
    float* input() const { return input_.as<float>() + list_bytes() / sizeof(float); }

    // Throws Error: the kernel stopped.
    void run(const std::vector<LaunchRow>& rows) { launch(words_[drs::F_READ_WORDS] * WORD, 0, rows); }

    // The output of the last launch, float32 [B, output_stride()]: the logits, and what fills the last word; or hidden states.
    const float* output() {
        output_.from_device(words_[drs::F_WRITTEN_WORDS] * WORD);
        return output_.as<float>();
    }

    int64_t output_stride() const { return static_cast<int64_t>(words_[drs::F_WRITTEN_WORDS] * WORD / sizeof(float)) / batch_; }

    // How many layers of the first `rows` rows of each video replayed in the last launch, of decode forwards. Throws Error: the
    // controller stopped.
    int64_t replayed(int64_t rows) const {
        int64_t count = 0;
        for (const int64_t layer : spec_.gated) {
            const uint32_t computing = answer(layer, layer)[drs::R_INDEX_REGISTER];
            for (int64_t row = 0; row < batch_; ++row) {
                count += row % own_ < rows && (computing >> row & 1u) == 0 ? 1 : 0;
            }
        }
        return count;
    }

    // ---- short programs

    // Decides for one layer. replay [B], score float32 [B], new chain counts int32 [B].
    void gate(int64_t layer, const GateInputs& inputs, uint8_t* replay, float* score, int32_t* chain) {
        const uint32_t entry = decisions_.at(layer);
        const uint64_t query = put(list_bytes(), inputs.query, inputs.heads, inputs.depth, inputs.x);
        const uint64_t key = put(query, inputs.keys, inputs.kv_heads, inputs.depth, inputs.cached);
        if (query - list_bytes() != field(entry, step::DECIDE_ROWS_QUERY_WORDS) * WORD || key - query != field(entry, step::DECIDE_ROWS_KEY_WORDS) * WORD) {
            throw Error("the gate reads other sizes than the program", "layer " + std::to_string(layer),
                        "use the files of one artifact together");
        }
        std::vector<LaunchRow> list(rows());
        for (size_t row = 0; row < rows(); ++row) {
            list[row] = {0, static_cast<uint32_t>(inputs.step), true, static_cast<uint32_t>(inputs.chain[row])};
        }
        launch(key, entry, list);
        const uint32_t* result = answer(layer, 0);
        computing_[layer] = result[drs::R_INDEX_REGISTER];
        for (size_t row = 0; row < rows(); ++row) {
            replay[row] = (result[drs::R_INDEX_REGISTER] >> row & 1u) == 0 ? 1 : 0;
            std::memcpy(&score[row], &result[drs::R_SCORES + row], sizeof(float));
            score[row] = spec_.at_most ? -score[row] : score[row];
            chain[row] = static_cast<int32_t>(result[drs::R_CHAIN + row]);
        }
    }

    // One layer's MLP: row b of its output for x, or cached[b] where replay[b]; float32 [B, H]. The Index Register is what the
    // controller decided, or the host's mask in a layer without a gate in the table.
    // Throws Error: the mask is not what the controller decided.
    void mlp(int64_t layer, const float* x, const uint8_t* replay, const float* cached, float* y) {
        uint32_t wanted = 0;
        for (size_t row = 0; row < rows(); ++row) wanted |= (replay[row] == 0 ? 1u : 0u) << row;
        if (decisions_.count(layer) != 0 && computing_.at(layer) != wanted) {
            throw Error("the host's replay mask is not what the DRS controller decided", "layer " + std::to_string(layer),
                        "use the files of one artifact together");
        }
        std::copy(cached, cached + batch_ * hidden_, y);
        if (wanted != 0) product(mlps_.at(static_cast<size_t>(layer)), x, hidden_, wanted, y, hidden_);
    }

    // One linear, or several side by side: x float32 [B, inputs] to y float32 [B, channels], every row.
    void linear(const std::string& name, const float* x, float* y) {
        const auto found = std::find(spec_.linears.begin(), spec_.linears.end(), name);
        if (found == spec_.linears.end()) {
            throw Error("the accelerator has no linear `" + name + "`", "", "use the files of one artifact together");
        }
        const uint32_t entry = linears_.at(static_cast<size_t>(found - spec_.linears.begin()));
        product(entry, x, field(entry, step::LINEAR_INPUTS), ALL_ROWS, y, field(entry, step::LINEAR_CHANNELS));
    }

private:
    static constexpr uint64_t PAGE = 4096;
    static constexpr uint64_t WORD = 16;  // bytes of a memory word; every row and every head begins one

    size_t rows() const { return static_cast<size_t>(batch_); }

    // Bytes of the list of rows at the beginning of the input.
    uint64_t list_bytes() const { return rows() * WORD; }

    static uint64_t padded(int64_t floats) {
        return (sizeof(float) * static_cast<uint64_t>(floats) + WORD - 1) / WORD * WORD;
    }

    static std::string name_of(uint32_t status, const Statuses& known) {
        const auto found = known.find(status);
        return found == known.end() ? std::to_string(status) : found->second;
    }

    // Bytes of every buffer on the device.
    static uint64_t buffer_bytes() {
        uint64_t bytes = 0;
        for (const KernelSpec& kernel : kernel_specs()) {
            for (const ArgumentSpec& argument : kernel.arguments) {
                bytes += argument.kind == Kind::SCALAR ? 0 : (argument.bytes + PAGE - 1) / PAGE * PAGE;
            }
        }
        return bytes;
    }

    int64_t field(uint32_t instruction, size_t word) const {
        return words_[words_.size() - drs::PROGRAM_WORDS * (words_[drs::F_INSTRUCTIONS] - instruction) + word];
    }

    // The kernel does not know how long its buffers are: a program that reaches beyond one must not get there.
    void read_program(const Mapping& program, const std::string& where, const DecoderSpec& decoder) {
        words_.resize(program.bytes() / sizeof(uint32_t));
        if (words_.size() < drs::HEADER_WORDS) {
            throw Error("the control table is shorter than its header", where, "compile the model again");
        }
        std::memcpy(words_.data(), program.data(), words_.size() * sizeof(uint32_t));
        const uint64_t ports = kernel_.weights().size(), together = words_[drs::F_PORTS] / ports;
        const std::map<std::string, uint64_t> needs = {
            {"weights_0", words_[drs::F_WEIGHT_WORDS] * together},
            {"cache_0", (static_cast<uint64_t>(words_[drs::F_CACHED_KEY_WORDS]) + words_[drs::F_CACHED_VALUE_WORDS]) * together},
            {"constants", words_[drs::F_CONSTANT_WORDS]},
            {"inputs", words_[drs::F_READ_WORDS]},
            {"outputs", words_[drs::F_WRITTEN_WORDS]},
            {"replay", words_[drs::F_REPLAY_WORDS]}};
        for (const auto& need : needs) {
            const uint64_t room = need.second == 0 ? 0 : kernel_.bytes_of(need.first);
            if (need.second * WORD > room) {
                throw Error("the control table needs " + std::to_string(need.second * WORD) + " bytes of `" + need.first +
                                "`, which has " + std::to_string(room),
                            where, "use the files of one artifact together");
            }
        }
        const uint64_t logits = padded(decoder.vocab != 0 ? decoder.vocab : hidden_) / WORD, row = padded(hidden_) / WORD;
        const bool step = words_[drs::F_READ_WORDS] == words_[drs::F_ROWS] * (1 + row) && words_[drs::F_WRITTEN_WORDS] == words_[drs::F_ROWS] * logits;
        if (words_[drs::F_ROWS] != rows() || words_[drs::F_VIDEOS] * static_cast<uint64_t>(own_) != rows() || (spec_.whole && !step) || words_[drs::F_PORTS] % ports != 0 ||
            words_.size() < drs::HEADER_WORDS + static_cast<uint64_t>(drs::PROGRAM_WORDS) * words_[drs::F_INSTRUCTIONS]) {
            throw Error("the control table is of another decoder than this host program", where,
                        "use the files of one artifact together");
        }
        for (uint32_t i = 0; i < words_[drs::F_INSTRUCTIONS]; ++i) {
            const uint32_t opcode = field(i, 0) & 0xFFFF, layer = static_cast<uint32_t>(field(i, 0)) >> 16;
            if (opcode == step::OP_DECIDE_ROWS) decisions_[layer] = i;
            if (opcode == step::OP_MLP) mlps_.push_back(i);
            if (opcode == step::OP_LINEAR) linears_.push_back(i);
        }
    }

    // Once: every weight port's bytes, and the constants.
    void load_weights(const Artifact& artifact) {
        const Mapping& bytes = artifact.data(spec_.weights);
        const std::string where = artifact.place(spec_.weights);
        const Safetensors file(where, bytes.data(), bytes.bytes());
        std::vector<std::string> names = kernel_.weights();
        for (const std::string& name : kernel_.beginning(CONSTANTS)) names.push_back(name);
        for (const std::string& name : names) {
            const uint64_t found = file.info(name).bytes, wanted = kernel_.bytes_of(name);
            if (found != wanted) {
                throw Error("`" + name + "` has " + std::to_string(found) + " bytes; the kernel reads " + std::to_string(wanted),
                            where, "use the files of one artifact together");
            }
            kernel_.fill(name);  // all before the first byte: no region of contiguous memory may have room for the last one
        }
        for (const std::string& name : names) {
            const uint64_t wanted = kernel_.bytes_of(name);
            Mapped buffer = kernel_.map(name);
            file.read(name, 0, buffer.as<char>(), wanted);
            buffer.to_device(wanted);
        }
    }

    // Once: the kernel checks the table and keeps it on chip.
    void load(const Mapping& bytes, const std::string& where) {
        kernel_.write("step_program", bytes.data(), bytes.bytes());
        kernel_.set("op", static_cast<uint32_t>(step::LOAD));
        kernel_.set("bytes", static_cast<uint32_t>(bytes.bytes()));
        kernel_.run();
        report_.from_device(WORD);
        const uint32_t status = report_.as<uint32_t>()[STATUS];
        if (status != 0) {
            throw Error("the kernel refuses the control table with status " + name_of(status, TABLE_STATUSES), where,
                        "copy the artifact again, and link its kernels");
        }
    }

    // Writes the list of rows, and runs the kernel. given: bytes of the input, with
    // the list. Throws Error: the kernel stopped.
    void launch(uint64_t given, uint32_t entry, const std::vector<LaunchRow>& list) {
        std::memset(input_.as<char>(), 0, list_bytes());
        bool decides = false;
        for (size_t row = 0; row < rows(); ++row) {
            const LaunchRow& own = list[row];
            const uint32_t place = static_cast<uint32_t>(row / static_cast<size_t>(own_)) | (own.active ? 1u : 0u) << step::ACTIVE_BIT;
            const uint32_t word[] = {own.position, own.step, place, own.before};
            std::memcpy(input_.as<char>() + row * WORD, word, WORD);
            decides = decides || (own.active && own.step != step::NO_STEP);
        }
        input_.to_device(given);
        kernel_.set(entry_, entry);
        kernel_.run();
        report_.from_device(decides ? report_.bytes() : WORD);
        const uint32_t* report = report_.as<uint32_t>();
        if (report[STATUS] != 0) {
            throw Error("the kernel stopped with status " + name_of(report[STATUS], RUN_STATUSES) + " at instruction " +
                            std::to_string(report[INSTRUCTION]),
                        kernel_spec().name, "link the kernels of this artifact again");
        }
    }

    // What the controller decided of a layer: answer `number` of the last report. Throws Error: it stopped.
    const uint32_t* answer(int64_t layer, int64_t number) const {
        const uint32_t* found = report_.as<uint32_t>() + ANSWERS + drs::ANSWER_WORDS * number;
        if (found[drs::R_STATUS] != 0) {
            throw Error("the DRS controller stopped with status " + name_of(found[drs::R_STATUS], TABLE_STATUSES),
                        "layer " + std::to_string(layer),
                        "docs/reference/drs_table.md lists the statuses; copy the artifact again");
        }
        return found;
    }

    // The active rows of a product, x float32 [B, inputs] to y float32 [B, channels].
    void product(uint32_t entry, const float* x, int64_t inputs, uint32_t active, float* y, int64_t channels) {
        std::vector<LaunchRow> list(rows());
        for (size_t row = 0; row < rows(); ++row) list[row].active = (active >> row & 1u) != 0;
        launch(append(list_bytes(), x, rows(), inputs), entry, list);
        output_.from_device(rows() * padded(channels));
        for (size_t row = 0; row < rows(); ++row) {
            if ((active >> row & 1u) != 0) {
                std::memcpy(y + row * static_cast<size_t>(channels), output_.as<char>() + row * padded(channels),
                            sizeof(float) * static_cast<size_t>(channels));
            }
        }
    }

    // An operand at byte `at` of the input: heads [B, heads, depth], or rows [B, H] where there are none; each head and each row
    // begins a word. Returns the byte behind it.
    uint64_t put(uint64_t at, const float* values, int64_t heads, int64_t depth, const float* input) {
        return values == nullptr ? append(at, input, rows(), hidden_) : append(at, values, rows() * static_cast<size_t>(heads), depth);
    }

    uint64_t append(uint64_t at, const float* values, size_t count, int64_t width) {
        const uint64_t pitch = padded(width), own = sizeof(float) * static_cast<uint64_t>(width);
        if (at + count * pitch > input_.bytes()) {
            throw Error("rows of " + std::to_string(width) + " values are too long for the kernel's input", kernel_spec().name,
                        "use the files of one artifact together");
        }
        for (size_t i = 0; i < count; ++i) {
            std::memset(input_.as<char>() + at + own, 0, pitch - own);
            std::memcpy(input_.as<char>() + at, values + i * static_cast<size_t>(width), own);
            at += pitch;
        }
        return at;
    }

    AcceleratorSpec spec_;
    int64_t batch_, own_, hidden_;  // rows of a launch, and of each video
    Device device_;
    ComputeUnit kernel_;
    std::vector<uint32_t> words_;                          // of the control table
    std::map<int64_t, uint32_t> decisions_;                // of short programs: layer -> instruction
    std::vector<uint32_t> mlps_, linears_;                 // their instructions, in order
    std::map<int64_t, uint32_t> computing_;                // layer -> rows that the last decision has compute
    size_t entry_ = 0;  // place of the argument
    Mapped input_, output_, report_;
    std::vector<Mapped> kept_;  // from launch to launch: caches and replay
};

}  // namespace fastcar_host
