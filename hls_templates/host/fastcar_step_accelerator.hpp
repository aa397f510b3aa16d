// An accelerator that runs whole decode steps, a launch per token. Weights, caches, program and table stay on the device. The
// same steps as fastcar_compile/runtime/backends/accelerator/step.py.
#ifndef FASTCAR_STEP_ACCELERATOR_HPP
#define FASTCAR_STEP_ACCELERATOR_HPP

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fastcar_artifact.hpp"
#include "fastcar_memory.hpp"
#include "fastcar_program.hpp"
#include "fastcar_safetensors.hpp"
#include "fastcar_xrt.hpp"

namespace fastcar_host {

// Words of a step program's header (docs/reference/step_program.md).
enum Header {
    ROWS = 5,
    PORTS = 6,
    CONSTANT_WORDS = 9,
    WEIGHT_WORDS = 10,
    KEY_WORDS = 11,
    VALUE_WORDS = 12,
    INPUT_WORDS = 13,
    OUTPUT_WORDS = 14,
    REPLAY_WORDS = 15,
    HEADER_WORDS = 16
};

// 32-bit words of the report: what became of the launch, and behind them the controller's answer for every layer.
enum Report { STATUS = 0, INSTRUCTION = 1, ANSWERS = 4 };
enum Answer { ANSWER_STATUS = 0, INDEX_REGISTER = 1, ANSWER_WORDS = 68 };

class StepAccelerator {
public:
    // `meminfo`: says how much contiguous memory is free, on a board whose memory is also Linux's.
    // `artifact`: the design's weights, table and program were checked.
    // Throws Error: no device, an xclbin of another design, too little memory, or files that do not fit the design.
    StepAccelerator(const Artifact& artifact, const DecoderSpec& decoder, const std::string& xclbin, unsigned device,
                    const std::string& meminfo)
        : spec_(accelerator_spec()), batch_(decoder.batch), device_(device, xclbin, {step_spec()}),
          kernel_(device_, step_spec()) {
        const Mapping &program = artifact.data(spec_.program), &table = artifact.data(spec_.table);
        check_program(program, artifact.place(spec_.program), decoder);
        if (spec_.shared_memory) {
            require_contiguous(buffer_bytes(), meminfo);
        }
        load_weights(artifact);
        for (const char* name : {"op", "bytes", "position", "step"}) {
            kernel_.set(name, 0u);
        }
        position_ = kernel_.scalar<uint32_t>("position");
        step_ = kernel_.scalar<uint32_t>("step");
        input_ = kernel_.map("input");
        output_ = kernel_.map("output");
        report_ = kernel_.map("report");
        for (const std::string& name : kernel_.beginning("cache_")) {
            kept_.push_back(kernel_.map(name));
        }
        kept_.push_back(kernel_.map("replay"));
        reset();
        load(OP_LOAD_PROGRAM, program, "step program", artifact.place(spec_.program), PROGRAM_STATUSES);
        load(OP_LOAD_TABLE, table, "control table", artifact.place(spec_.table), TABLE_STATUSES);
        kernel_.set("op", OP_RUN);
    }

    StepAccelerator(const StepAccelerator&) = delete;  // the compute unit refers to the device
    StepAccelerator& operator=(const StepAccelerator&) = delete;

    // Before another video: keys, values and everything of replay are 0.
    void reset() {
        for (Mapped& buffer : kept_) {
            buffer.clear();
        }
    }

    // The rows of the next launch, float32 [B, H]: what is written here is what `run` gives the kernel.
    float* input() const { return input_.as<float>(); }

    // One position of every row: decode forward `step`, or NO_STEP. Throws Error: the kernel stopped.
    void run(int64_t position, uint32_t step) {
        input_.to_device(input_bytes_);
        kernel_.set(position_, static_cast<uint32_t>(position));
        kernel_.set(step_, step);
        kernel_.run();
        report_.from_device(step == NO_STEP ? WORD : report_.bytes());
        const uint32_t* report = report_.as<uint32_t>();
        if (report[STATUS] != 0) {
            throw Error("the step kernel stopped with status " + name_of(report[STATUS], RUN_STATUSES) + " at instruction " +
                            std::to_string(report[INSTRUCTION]),
                        step_spec().name, "link the kernels of this artifact again");
        }
    }

    // The output of the last launch, float32 [B, output_stride()]: the logits, and what fills the last word.
    const float* output() {
        output_.from_device(output_bytes_);
        return output_.as<float>();
    }

    int64_t output_stride() const { return static_cast<int64_t>(output_bytes_ / sizeof(float)) / batch_; }

    // How many (layer, row) replayed in the last launch, which was a decode forward. Throws Error: the controller stopped.
    int64_t replayed() const {
        int64_t count = 0;
        for (const int64_t layer : spec_.gated) {
            const uint32_t* answer = report_.as<uint32_t>() + ANSWERS + ANSWER_WORDS * layer;
            if (answer[ANSWER_STATUS] != 0) {
                throw Error("the DRS controller stopped with status " + name_of(answer[ANSWER_STATUS], TABLE_STATUSES),
                            "layer " + std::to_string(layer),
                            "docs/reference/drs_table.md lists the statuses; copy the artifact again");
            }
            for (int64_t row = 0; row < batch_; ++row) {
                count += (answer[INDEX_REGISTER] >> row & 1u) == 0 ? 1 : 0;
            }
        }
        return count;
    }

private:
    static constexpr uint64_t PAGE = 4096;
    static constexpr uint64_t WORD = 16;  // bytes of a memory word

    static std::string name_of(uint32_t status, const Statuses& known) {
        const auto found = known.find(status);
        return found == known.end() ? std::to_string(status) : found->second;
    }

    // Bytes of every buffer on the device.
    static uint64_t buffer_bytes() {
        uint64_t bytes = 0;
        for (const ArgumentSpec& argument : step_spec().arguments) {
            bytes += argument.kind == Kind::SCALAR ? 0 : (argument.bytes + PAGE - 1) / PAGE * PAGE;
        }
        return bytes;
    }

    // The kernel does not know how long its buffers are: a program that reaches beyond one must not get there.
    void check_program(const Mapping& program, const std::string& where, const DecoderSpec& decoder) {
        uint32_t header[HEADER_WORDS];
        if (program.bytes() < sizeof(header)) {
            throw Error("the step program is shorter than its header", where, "compile the model again");
        }
        std::memcpy(header, program.data(), sizeof(header));
        const uint64_t ports = kernel_.weights().size(), together = header[PORTS] / ports;
        const std::map<std::string, uint64_t> words = {
            {"weights_0", header[WEIGHT_WORDS] * together},
            {"cache_0", (static_cast<uint64_t>(header[KEY_WORDS]) + header[VALUE_WORDS]) * together},
            {"constants", header[CONSTANT_WORDS]},
            {"input", header[INPUT_WORDS]},
            {"output", header[OUTPUT_WORDS]},
            {"replay", header[REPLAY_WORDS]}};
        for (const auto& need : words) {
            if (need.second * WORD > kernel_.bytes_of(need.first)) {
                throw Error("the step program needs " + std::to_string(need.second * WORD) + " bytes of `" + need.first +
                                "`, which has " + std::to_string(kernel_.bytes_of(need.first)),
                            where, "use the files of one artifact together");
            }
        }
        input_bytes_ = sizeof(float) * static_cast<uint64_t>(batch_ * decoder.hidden);
        output_bytes_ = header[OUTPUT_WORDS] * WORD;
        const uint64_t logits = (sizeof(float) * static_cast<uint64_t>(decoder.vocab) + WORD - 1) / WORD;
        if (header[ROWS] != static_cast<uint64_t>(batch_) || header[INPUT_WORDS] * WORD != input_bytes_ ||
            header[OUTPUT_WORDS] != header[ROWS] * logits || header[PORTS] % ports != 0) {
            throw Error("the step program is of another decoder than this host program", where,
                        "use the files of one artifact together");
        }
    }

    // Once: every weight port's bytes, and the constants.
    void load_weights(const Artifact& artifact) {
        const Mapping& bytes = artifact.data(spec_.weights);
        const std::string where = artifact.place(spec_.weights);
        const Safetensors file(where, bytes.data(), bytes.bytes());
        std::vector<std::string> names = kernel_.weights();
        names.push_back(CONSTANTS);
        for (const std::string& name : names) {
            const uint64_t found = file.info(name).bytes, wanted = kernel_.bytes_of(name);
            if (found != wanted) {
                throw Error("`" + name + "` has " + std::to_string(found) + " bytes; the step kernel reads " +
                                std::to_string(wanted),
                            where, "use the files of one artifact together");
            }
            Mapped buffer = kernel_.map(name);
            file.read(name, 0, buffer.as<char>(), wanted);
            buffer.to_device(wanted);
        }
    }

    // Once: the kernel checks a program or a table and keeps it on chip.
    void load(uint32_t operation, const Mapping& bytes, const std::string& what, const std::string& where,
              const Statuses& statuses) {
        kernel_.write("program", bytes.data(), bytes.bytes());
        kernel_.set("op", operation);
        kernel_.set("bytes", static_cast<uint32_t>(bytes.bytes()));
        kernel_.run();
        report_.from_device(WORD);
        const uint32_t status = report_.as<uint32_t>()[STATUS];
        if (status != 0) {
            throw Error("the step kernel refuses the " + what + " with status " + name_of(status, statuses), where,
                        "copy the artifact again, and link its kernels");
        }
    }

    AcceleratorSpec spec_;
    int64_t batch_;
    Device device_;
    ComputeUnit kernel_;
    size_t position_ = 0, step_ = 0;  // places of the arguments
    Mapped input_, output_, report_;
    std::vector<Mapped> kept_;  // from launch to launch: caches and replay
    uint64_t input_bytes_ = 0, output_bytes_ = 0;
};

}  // namespace fastcar_host

#endif
