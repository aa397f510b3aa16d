// The accelerator of one decoder: weights of every call on the device; one kernel decides and computes. The same
// steps as fastcar_compile/runtime/backends/accelerator.
#ifndef FASTCAR_ACCELERATOR_HPP
#define FASTCAR_ACCELERATOR_HPP

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fastcar_artifact.hpp"
#include "fastcar_memory.hpp"
#include "fastcar_safetensors.hpp"
#include "fastcar_xrt.hpp"

namespace fastcar_host {

// Words of the table and of the controller's result (docs/reference/drs_table.md).
static const size_t TABLE_CRC = 2;
enum Result { STATUS = 0, INDEX_REGISTER = 1, SCORES = 4, CHAIN = 36 };

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
    Accelerator(const Artifact& artifact, const std::string& xclbin, unsigned device, const std::string& meminfo)
        : spec_(accelerator_spec()), device_(device, xclbin, {engine_spec()}), engine_(device_, engine_spec()),
          computing_(static_cast<size_t>(spec_.layers), 0) {
        const Mapping& bytes = artifact.data(spec_.weights);
        const Safetensors weights(artifact.place(spec_.weights), bytes.data(), bytes.bytes());
        if (spec_.shared_memory) {
            require_contiguous(buffer_bytes(weights), meminfo);
        }
        for (int64_t layer = 0; layer < spec_.layers; ++layer) {
            load_stream(weights, "layer_" + std::to_string(layer));
        }
        for (int64_t layer : spec_.network ? spec_.gated : std::vector<int64_t>()) {
            load_network(weights, layer);
        }
        for (const LinearSpec& linear : spec_.linears) {
            load_stream(weights, linear.name);
            linears_.emplace(linear.name, linear);
        }
        for (const ArgumentSpec& argument : engine_spec().arguments) {
            if (argument.kind == Kind::SCALAR) {
                engine_.set(argument.name, 0u);
            }
        }
        load_table(artifact.data(spec_.table), artifact.place(spec_.table));
    }

    Accelerator(const Accelerator&) = delete;  // the compute units refer to the device
    Accelerator& operator=(const Accelerator&) = delete;

    // Decides for one layer. replay [B], score float32 [B], new chain counts int32 [B].
    void gate(int64_t layer, const GateInputs& inputs, uint8_t* replay, float* score, int32_t* chain) {
        const std::vector<char> query = operand(inputs.query, inputs.heads, inputs.depth, inputs.x);
        const std::vector<char> key = operand(inputs.keys, inputs.kv_heads, inputs.depth, inputs.cached);
        engine_.write("query", query.data(), query.size());
        if (spec_.network) {
            write_beside_network(layer, key);
        } else {
            engine_.write("key", key.data(), key.size());
        }
        engine_.write("chain", inputs.chain, sizeof(int32_t) * rows());
        engine_.set("op", OP_GATE);
        engine_.set("step", static_cast<uint32_t>(inputs.step));
        engine_.set("query_words", static_cast<uint32_t>(query.size() / WORD));
        engine_.set("key_words", static_cast<uint32_t>(key.size() / WORD));
        engine_.set("crc", table_crc_);
        engine_.set("layer", static_cast<uint32_t>(layer));
        engine_.run();
        const std::vector<uint32_t> result = answer("layer " + std::to_string(layer));
        computing_[static_cast<size_t>(layer)] = result[INDEX_REGISTER];
        for (size_t row = 0; row < rows(); ++row) {
            replay[row] = (result[INDEX_REGISTER] >> row & 1u) == 0 ? 1 : 0;
            std::memcpy(&score[row], &result[SCORES + row], sizeof(float));
            score[row] = spec_.at_most ? -score[row] : score[row];
            chain[row] = static_cast<int32_t>(result[CHAIN + row]);
        }
    }

    // One layer's MLP: row b of its output for x, or cached[b] where replay[b]; float32 [B, H]. The Index Register is what the
    // controller decided, or the host's mask in a layer without a gate in the table.
    // Throws Error: the mask is not what the controller decided.
    void mlp(int64_t layer, const float* x, const uint8_t* replay, const float* cached, float* y) {
        const uint32_t wanted = computing_rows(replay);
        if (is_gated(layer) && computing_[static_cast<size_t>(layer)] != wanted) {
            throw Error("the host's replay mask is not what the DRS controller decided", "layer " + std::to_string(layer),
                        "use the files of one artifact together");
        }
        if (wanted == 0) {  // nothing to launch: the rows are copied where they are
            std::copy(cached, cached + spec_.batch * spec_.hidden, y);
            return;
        }
        write_rows("cached", cached, spec_.hidden);
        set_operation(OP_MLP, LinearSpec());
        run("layer_" + std::to_string(layer), wanted, x, spec_.hidden, y, spec_.hidden);
    }

    // One linear, or several side by side: x float32 [B, inputs] to y float32 [B, channels], every row.
    void linear(const std::string& name, const float* x, float* y) {
        const auto found = linears_.find(name);
        if (found == linears_.end()) {
            throw Error("the accelerator has no linear `" + name + "`", "", "use the files of one artifact together");
        }
        const LinearSpec& call = found->second;
        set_operation(call.biased ? OP_LINEAR_BIAS : OP_LINEAR, call);
        run(name, 0xFFFFFFFFu, x, call.inputs, y, call.channels);
    }

private:
    static constexpr uint64_t PAGE = 4096;
    static constexpr uint64_t WORD = 16;  // bytes of a memory word; every row and every head begins one

    size_t rows() const { return static_cast<size_t>(spec_.batch); }

    static uint64_t padded(int64_t floats) {
        return (sizeof(float) * static_cast<uint64_t>(floats) + WORD - 1) / WORD * WORD;
    }

    // Bytes of every buffer on the device: all weight streams, and the kernels' other memory arguments.
    uint64_t buffer_bytes(const Safetensors& weights) const {
        const auto pages = [](uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; };
        uint64_t bytes = 0;
        for (int64_t layer = 0; layer < spec_.layers; ++layer) {
            bytes += pages(weights.info("layer_" + std::to_string(layer)).bytes);
        }
        for (int64_t layer : spec_.network ? spec_.gated : std::vector<int64_t>()) {
            bytes += pages(weights.info("gate_" + std::to_string(layer)).bytes + rows() * padded(spec_.hidden));
        }
        for (const LinearSpec& linear : spec_.linears) {
            bytes += pages(weights.info(linear.name).bytes);
        }
        for (const ArgumentSpec& argument : engine_spec().arguments) {
            const bool own = argument.kind != Kind::SCALAR && argument.name.rfind("weights_", 0) != 0;
            bytes += own ? pages(argument.bytes) : 0;
        }
        return bytes;
    }

    // One buffer per weight port, holding that port's section of the stream.
    void load_stream(const Safetensors& file, const std::string& name) {
        const std::vector<std::string> ports = engine_.weights();
        const uint64_t bytes = file.info(name).bytes, section = bytes / ports.size();
        if (section * ports.size() != bytes || section > engine_.bytes_of(ports.front()) || section % WORD != 0) {
            throw Error("`" + name + "` has " + std::to_string(bytes) + " bytes; the kernel takes at most " +
                            std::to_string(engine_.bytes_of(ports.front())) + " on each of " +
                            std::to_string(ports.size()) + " ports",
                        spec_.weights, "use the files of one artifact together");
        }
        for (size_t port = 0; port < ports.size(); ++port) {
            xrt::bo buffer = engine_.make_buffer(ports[port], section);
            file.read(name, port * section, buffer.map(), section);
            buffer.sync(XCL_BO_SYNC_BO_TO_DEVICE);
            streams_[name].push_back(buffer);
        }
    }

    // A layer's network lies behind the words of the cached rows, in a buffer of its own.
    void load_network(const Safetensors& file, int64_t layer) {
        const std::string name = "gate_" + std::to_string(layer);
        const uint64_t bytes = file.info(name).bytes, room = rows() * padded(spec_.hidden);
        xrt::bo buffer = engine_.make_buffer("key", room + bytes);
        std::memset(buffer.map(), 0, room);
        file.read(name, 0, buffer.map<char*>() + room, bytes);
        buffer.sync(XCL_BO_SYNC_BO_TO_DEVICE);
        networks_.emplace(layer, buffer);
    }

    void write_beside_network(int64_t layer, const std::vector<char>& cached) {
        xrt::bo& buffer = networks_.at(layer);
        std::memcpy(buffer.map(), cached.data(), cached.size());
        buffer.sync(XCL_BO_SYNC_BO_TO_DEVICE);
        engine_.bind("key", buffer);
    }

    // Once: the controller checks the table and keeps it on chip.
    void load_table(const Mapping& table, const std::string& path) {
        if (table.bytes() < (TABLE_CRC + 1) * sizeof(uint32_t)) {
            throw Error("the DRS table is too short", path, "compile the model again");
        }
        std::memcpy(&table_crc_, table.data() + TABLE_CRC * sizeof(uint32_t), sizeof(table_crc_));
        engine_.write("table", table.data(), table.bytes());
        bind_weights("layer_0");
        engine_.set("op", OP_TABLE);
        engine_.set("table_bytes", static_cast<uint32_t>(table.bytes()));
        engine_.run();
        answer("loading " + path);
    }

    // What the controller wrote in the last run.
    std::vector<uint32_t> answer(const std::string& where) {
        std::vector<uint32_t> result(engine_.bytes_of("result") / sizeof(uint32_t));
        engine_.read("result", result.data(), result.size() * sizeof(uint32_t));
        if (result[STATUS] != 0) {
            throw Error("the DRS controller stopped with status " + std::to_string(result[STATUS]), where,
                        "docs/reference/drs_table.md lists the statuses; copy the artifact again");
        }
        return result;
    }

    uint32_t computing_rows(const uint8_t* replay) const {
        uint32_t computing = 0;
        for (size_t row = 0; row < rows(); ++row) {
            computing |= (replay[row] == 0 ? 1u : 0u) << row;
        }
        return computing;
    }

    bool is_gated(int64_t layer) const {
        return std::find(spec_.gated.begin(), spec_.gated.end(), layer) != spec_.gated.end();
    }

    // The weight arguments, and what a run that computes nothing leaves alone.
    void bind_weights(const std::string& stream) {
        const std::vector<std::string> ports = engine_.weights();
        for (size_t port = 0; port < ports.size(); ++port) {
            engine_.bind(ports[port], streams_.at(stream)[port]);
        }
        for (const char* argument : {"x", "cached", "table", "query", "key", "chain"}) {
            engine_.fill(argument);
        }
    }

    // `call` plays no part in an MLP.
    void set_operation(uint32_t operation, const LinearSpec& call) {
        engine_.set("op", operation);
        engine_.set("inputs", static_cast<int32_t>(call.inputs));
        engine_.set("channels", static_cast<int32_t>(call.channels));
        engine_.set("tile", static_cast<int32_t>(call.tile));
        engine_.set("tiles", static_cast<int32_t>(call.tiles));
    }

    void run(const std::string& stream, uint32_t computed, const float* x, int64_t inputs, float* y, int64_t outputs) {
        bind_weights(stream);
        write_rows("x", x, inputs);
        engine_.set("index_register", computed);
        engine_.run();
        std::vector<char> words(rows() * padded(outputs));
        engine_.read("y", words.data(), words.size());
        for (size_t row = 0; row < rows(); ++row) {
            std::memcpy(y + row * static_cast<size_t>(outputs), &words[row * padded(outputs)],
                        sizeof(float) * static_cast<size_t>(outputs));
        }
    }

    void write_rows(const std::string& argument, const float* values, int64_t width) {
        std::vector<char> words(rows() * padded(width), 0);
        for (size_t row = 0; row < rows(); ++row) {
            std::memcpy(&words[row * padded(width)], values + row * static_cast<size_t>(width),
                        sizeof(float) * static_cast<size_t>(width));
        }
        engine_.write(argument, words.data(), words.size());
    }

    // The words of an operand: heads [B, heads, depth], then rows [B, H]; each head and each row begins one.
    std::vector<char> operand(const float* values, int64_t heads, int64_t depth, const float* input) const {
        std::vector<char> words;
        append(words, values, values == nullptr ? 0 : rows() * static_cast<size_t>(heads), depth);
        append(words, input, input == nullptr ? 0 : rows(), spec_.hidden);
        return words;
    }

    static void append(std::vector<char>& words, const float* values, size_t count, int64_t width) {
        const size_t first = words.size();
        words.resize(first + count * padded(width), 0);
        for (size_t i = 0; i < count; ++i) {
            std::memcpy(&words[first + i * padded(width)], values + i * static_cast<size_t>(width),
                        sizeof(float) * static_cast<size_t>(width));
        }
    }

    AcceleratorSpec spec_;
    Device device_;
    ComputeUnit engine_;
    std::map<std::string, std::vector<xrt::bo>> streams_;  // per call, a buffer per port
    std::map<int64_t, xrt::bo> networks_;                  // per layer, with room for the cached rows
    std::map<std::string, LinearSpec> linears_;
    std::vector<uint32_t> computing_;  // per layer: rows that the last decision has compute
    uint32_t table_crc_ = 0;
};

}  // namespace fastcar_host

#endif
