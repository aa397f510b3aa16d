// The accelerator of one decoder: weights of every call on the device, the TAS unit and DRS controller decide, the
// compute kernel computes. The same steps as fastcar_compile/runtime/backends/accelerator.
#ifndef FASTCAR_ACCELERATOR_HPP
#define FASTCAR_ACCELERATOR_HPP

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "fastcar_memory.hpp"
#include "fastcar_safetensors.hpp"
#include "fastcar_xrt.hpp"

namespace fastcar_host {

// Words of the table and of the controller's result, and an instruction (docs/reference/drs_table.md).
static const size_t TABLE_CRC = 2;
enum Result { STATUS = 0, COUNT = 1, INDEX_REGISTER = 2, HELD = 3, SCORES = 4, CHAIN = 36, RECORDS = 68 };
static const uint32_t COMPUTE_MLP = 2;
static const uint32_t NO_LAYER = 0xFFFFFFFFu;

// What a gate is decided on: q float32 [B, heads, depth]; the key of position - F, float32 [B, kv_heads, depth]; replays
// in a row, int32 [B].
struct GateInputs {
    const float* query;
    const float* keys;
    const int32_t* chain;
    int64_t heads;
    int64_t kv_heads;
    int64_t depth;
    int64_t step;
};

class Accelerator {
public:
    // `meminfo`: says how much contiguous memory is free, on a board whose memory is also Linux's.
    // Throws Error: no device, an xclbin of another design, too little memory, or files that do not fit the design.
    Accelerator(const std::string& artifact, const std::string& xclbin, unsigned device, const std::string& meminfo)
        : spec_(accelerator_spec()), device_(device, xclbin, {compute_spec(), controller_spec()}),
          compute_(device_, compute_spec()), controller_(device_, controller_spec()) {
        Safetensors weights(artifact + "/" + spec_.weights);
        if (spec_.shared_memory) {
            require_contiguous(buffer_bytes(weights), meminfo);
        }
        for (int64_t layer = 0; layer < spec_.layers; ++layer) {
            load_stream(weights, "layer_" + std::to_string(layer));
        }
        for (const LinearSpec& linear : spec_.linears) {
            load_stream(weights, linear.name);
            linears_.emplace(linear.name, linear);
        }
        load_table(artifact + "/" + spec_.table);
    }

    Accelerator(const Accelerator&) = delete;  // the compute units refer to the device
    Accelerator& operator=(const Accelerator&) = delete;

    // Before another video: the prefetch buffer holds nothing.
    void reset() {
        held_ = NO_LAYER;
        computed_.clear();
    }

    // Decides for one layer. replay [B], score float32 [B], new chain counts int32 [B].
    void gate(int64_t layer, const GateInputs& inputs, uint8_t* replay, float* score, int32_t* chain) {
        const uint64_t words = write_heads("query", inputs.query, inputs.heads, inputs.depth);
        const uint64_t key_words = write_heads("key", inputs.keys, inputs.kv_heads, inputs.depth);
        const std::vector<uint32_t> result = schedule(layer, inputs.step, words, key_words, inputs.chain);
        for (size_t row = 0; row < rows(); ++row) {
            replay[row] = (result[INDEX_REGISTER] >> row & 1u) == 0 ? 1 : 0;
            std::memcpy(&score[row], &result[SCORES + row], sizeof(float));
            chain[row] = static_cast<int32_t>(result[CHAIN + row]);
        }
    }

    // One layer's MLP: row b of its output for x, or cached[b] where replay[b]; float32 [B, H]. The rows that compute are
    // those that the controller dispatches. Of a layer without a gate in its table, the host's mask says what computes.
    // Throws Error: the mask is not what the controller dispatched.
    void mlp(int64_t layer, const float* x, const uint8_t* replay, const float* cached, float* y) {
        const uint32_t computed = computing_rows(layer, replay);
        if (computed == 0) {  // nothing to launch: the rows are copied where they are
            std::copy(cached, cached + spec_.batch * spec_.hidden, y);
            return;
        }
        write_rows("cached", cached, spec_.hidden);
        set_operation(OP_MLP, LinearSpec());
        run("layer_" + std::to_string(layer), computed, x, spec_.hidden, y, spec_.hidden);
    }

    // One linear, or several side by side: x float32 [B, inputs] to y float32 [B, channels], every row.
    void linear(const std::string& name, const float* x, float* y) {
        const auto found = linears_.find(name);
        if (found == linears_.end()) {
            throw Error("the accelerator has no linear `" + name + "`", "", "use the files of one artifact together");
        }
        const LinearSpec& call = found->second;
        set_operation(call.biased ? OP_LINEAR_BIAS : OP_LINEAR, call);
        compute_.fill("cached");
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
        for (const LinearSpec& linear : spec_.linears) {
            bytes += pages(weights.info(linear.name).bytes);
        }
        for (const KernelSpec& kernel : {compute_spec(), controller_spec()}) {
            for (const ArgumentSpec& argument : kernel.arguments) {
                const bool own = argument.kind != Kind::SCALAR && argument.name.rfind("weights_", 0) != 0;
                bytes += own ? pages(argument.bytes) : 0;
            }
        }
        return bytes;
    }

    // One buffer per weight port, holding that port's section of the stream.
    void load_stream(Safetensors& file, const std::string& name) {
        const std::vector<std::string> ports = compute_.weights();
        const uint64_t bytes = file.info(name).bytes, section = bytes / ports.size();
        if (section * ports.size() != bytes || section > compute_.bytes_of(ports.front()) || section % WORD != 0) {
            throw Error("`" + name + "` has " + std::to_string(bytes) + " bytes; the kernel takes at most " +
                            std::to_string(compute_.bytes_of(ports.front())) + " on each of " +
                            std::to_string(ports.size()) + " ports",
                        spec_.weights, "use the files of one artifact together");
        }
        for (size_t port = 0; port < ports.size(); ++port) {
            xrt::bo buffer = compute_.make_buffer(ports[port], section);
            file.read(name, port * section, buffer.map(), section);
            buffer.sync(XCL_BO_SYNC_BO_TO_DEVICE);
            streams_[name].push_back(buffer);
        }
    }

    // Once: the controller checks the table and keeps it on chip.
    void load_table(const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        const std::vector<char> table((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        if (!file || table.size() < (TABLE_CRC + 1) * sizeof(uint32_t)) {
            throw Error("the DRS table cannot be read", path, "give the folder of the artifact");
        }
        std::memcpy(&table_crc_, &table[TABLE_CRC * sizeof(uint32_t)], sizeof(table_crc_));
        controller_.write("table", table.data(), table.size());
        controller_.fill("query");
        controller_.fill("key");
        controller_.fill("chain");
        controller_.set("op", OP_TABLE);
        controller_.set("table_bytes", static_cast<uint32_t>(table.size()));
        const uint64_t words = controller_.bytes_of("result") / sizeof(uint32_t);
        controller_.set("capacity", static_cast<uint32_t>((words - RECORDS) / 2));
        ask(0, 0, 0, 0, "loading " + path);
    }

    // Runs the controller; its result.
    std::vector<uint32_t> ask(int64_t layer, int64_t step, uint64_t query_words, uint64_t key_words, const std::string& where) {
        controller_.set("crc", table_crc_);
        controller_.set("layer", static_cast<uint32_t>(layer));
        controller_.set("step", static_cast<uint32_t>(step));
        controller_.set("query_words", static_cast<uint32_t>(query_words));
        controller_.set("key_words", static_cast<uint32_t>(key_words));
        controller_.set("held", held_);
        controller_.run();
        std::vector<uint32_t> result(controller_.bytes_of("result") / sizeof(uint32_t));
        controller_.read("result", result.data(), result.size() * sizeof(uint32_t));
        if (result[STATUS] != 0 || result[COUNT] > (result.size() - RECORDS) / 2) {
            throw Error("the DRS controller stopped with status " + std::to_string(result[STATUS]), where,
                        "docs/reference/drs_table.md lists the statuses; copy the artifact again");
        }
        return result;
    }

    // Asks the controller for one layer, remembers which rows it dispatches to a core; its result.
    std::vector<uint32_t> schedule(int64_t layer, int64_t step, uint64_t query_words, uint64_t key_words, const int32_t* chain) {
        controller_.write("chain", chain, sizeof(int32_t) * rows());
        controller_.set("op", OP_GATE);
        const std::vector<uint32_t> result = ask(layer, step, query_words, key_words, "layer " + std::to_string(layer));
        uint32_t computed = 0;
        for (uint32_t i = 0; i < result[COUNT]; ++i) {
            const uint32_t record = result[RECORDS + 2 * i];
            computed |= (record >> 24) == COMPUTE_MLP ? 1u << ((record >> 16) & 31u) : 0u;
        }
        held_ = result[HELD];
        computed_[layer] = computed;
        return result;
    }

    // The Index Register of one layer's MLP.
    uint32_t computing_rows(int64_t layer, const uint8_t* replay) {
        if (computed_.count(layer) == 0) {  // a layer without a gate in the table
            const std::vector<int32_t> chain(rows(), 0);
            schedule(layer, 0, 0, 0, chain.data());
        }
        uint32_t computed = computed_.at(layer), wanted = 0;
        computed_.erase(layer);
        for (size_t row = 0; row < rows(); ++row) {
            wanted |= (replay[row] == 0 ? 1u : 0u) << row;
        }
        if (std::find(spec_.gated.begin(), spec_.gated.end(), layer) == spec_.gated.end()) {
            computed &= wanted;
        }
        if (computed != wanted) {
            throw Error("the host's replay mask is not what the DRS controller dispatched", "layer " + std::to_string(layer),
                        "use the files of one artifact together");
        }
        return computed;
    }

    // `call` plays no part in an MLP.
    void set_operation(uint32_t operation, const LinearSpec& call) {
        compute_.set("op", operation);
        compute_.set("inputs", static_cast<int32_t>(call.inputs));
        compute_.set("channels", static_cast<int32_t>(call.channels));
        compute_.set("tile", static_cast<int32_t>(call.tile));
        compute_.set("tiles", static_cast<int32_t>(call.tiles));
    }

    void run(const std::string& stream, uint32_t computed, const float* x, int64_t inputs, float* y, int64_t outputs) {
        const std::vector<std::string> ports = compute_.weights();
        for (size_t port = 0; port < ports.size(); ++port) {
            compute_.bind(ports[port], streams_.at(stream)[port]);
        }
        write_rows("x", x, inputs);
        compute_.set("index_register", computed);
        compute_.set("prefetch", 0u);  // all weights from memory: other programs may use the kernel in between
        compute_.run();
        std::vector<char> words(rows() * padded(outputs));
        compute_.read("y", words.data(), words.size());
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
        compute_.write(argument, words.data(), words.size());
    }

    // [B, heads, depth]; the number of words written.
    uint64_t write_heads(const std::string& argument, const float* values, int64_t heads, int64_t depth) {
        const size_t count = rows() * static_cast<size_t>(heads);
        std::vector<char> words(count * padded(depth), 0);
        for (size_t head = 0; head < count; ++head) {
            std::memcpy(&words[head * padded(depth)], values + head * static_cast<size_t>(depth),
                        sizeof(float) * static_cast<size_t>(depth));
        }
        controller_.write(argument, words.data(), words.size());
        return words.size() / WORD;
    }

    AcceleratorSpec spec_;
    Device device_;
    ComputeUnit compute_;
    ComputeUnit controller_;
    std::map<std::string, std::vector<xrt::bo>> streams_;  // per call, a buffer per port
    std::map<std::string, LinearSpec> linears_;
    std::map<int64_t, uint32_t> computed_;  // per layer that was scheduled: rows that compute
    uint32_t held_ = NO_LAYER;
    uint32_t table_crc_ = 0;
};

}  // namespace fastcar_host

#endif
