// The accelerator of one decoder: weights of every layer on the device, DRS decides, the MLP kernel computes.
// The same steps as fastcar_compile/runtime/backends/board.py.
#ifndef FASTCAR_ACCELERATOR_HPP
#define FASTCAR_ACCELERATOR_HPP

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "fastcar_safetensors.hpp"
#include "fastcar_xrt.hpp"

namespace fastcar_host {

class Accelerator {
public:
    // Throws Error: no device, an xclbin of another design, or files that do not fit it.
    Accelerator(const std::string& artifact, const std::string& xclbin, unsigned device)
        : spec_(accelerator_spec()), device_(device, xclbin, {fastcar_mlp_spec(), fastcar_drs_spec()}),
          mlp_(device_, fastcar_mlp_spec()), drs_(device_, fastcar_drs_spec()) {
        load_weights(artifact + "/" + spec_.weights);
        load_table(artifact + "/" + spec_.table);
    }

    // One layer: row b of the MLP's output for x, or cached[b] where replay[b]; all float32 [B, H].
    void mlp(int64_t layer, const float* x, const uint8_t* replay, const float* cached, float* y) {
        if (layer < 0 || layer >= spec_.layers) {
            throw Error("there is no layer " + std::to_string(layer), "", "use the files of one artifact together");
        }
        const uint32_t computed = dispatch(layer, replay);
        const size_t bytes = sizeof(float) * static_cast<size_t>(spec_.batch * spec_.hidden);
        if (computed == 0) {  // nothing to launch: the rows are copied where they are
            std::memcpy(y, cached, bytes);
            return;
        }
        const std::vector<std::string> names = mlp_.weights();
        for (size_t i = 0; i < names.size(); ++i) {
            mlp_.bind(names[i], weights_[static_cast<size_t>(layer)][i]);
        }
        write_rows("x", x);
        write_rows("cached", cached);
        mlp_.set("index_register", computed);
        mlp_.run();
        read_rows("y", y);
    }

private:
    static constexpr uint32_t COMPUTE_MLP = 2;  // docs/drs_table.md

    void load_weights(const std::string& path) {
        Safetensors file(path);
        const std::vector<std::string> names = mlp_.weights();
        for (int64_t layer = 0; layer < spec_.layers; ++layer) {
            const std::string tensor = "layer_" + std::to_string(layer);
            uint64_t first = 0;
            weights_.emplace_back();
            for (const std::string& name : names) {
                const uint64_t bytes = mlp_.bytes_of(name);
                xrt::bo buffer = mlp_.make_buffer(name);
                file.read(tensor, first, buffer.map(), bytes);
                buffer.sync(XCL_BO_SYNC_BO_TO_DEVICE);
                weights_.back().push_back(buffer);
                first += bytes;
            }
            if (first != file.info(tensor).bytes) {
                throw Error("`" + tensor + "` has " + std::to_string(file.info(tensor).bytes) + " bytes, the kernel takes " +
                                std::to_string(first),
                            path, "use the files of one artifact together");
            }
        }
    }

    void load_table(const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        const std::vector<char> table((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        if (!file || table.empty()) {
            throw Error("the DRS table cannot be read", path, "give the folder of the artifact");
        }
        drs_.write("table", table.data(), table.size());
        drs_.set("table_bytes", static_cast<uint32_t>(table.size()));
        drs_.set("capacity", static_cast<uint32_t>(drs_.bytes_of("result") / sizeof(uint32_t) - 2));
    }

    // The Index Register of the rows that DRS dispatches to a core.
    uint32_t dispatch(int64_t layer, const uint8_t* replay) {
        uint32_t index_register = 0;
        for (int64_t row = 0; row < spec_.batch; ++row) {
            index_register |= (replay[row] != 0 ? 0u : 1u) << row;
        }
        drs_.set("layer", static_cast<uint32_t>(layer));
        drs_.set("index_register", index_register);
        drs_.run();
        std::vector<uint32_t> result(drs_.bytes_of("result") / sizeof(uint32_t));
        drs_.read("result", result.data(), result.size() * sizeof(uint32_t));
        if (result[0] != 0 || result[1] > result.size() - 2) {
            throw Error("the DRS controller stopped with status " + std::to_string(result[0]),
                        "layer " + std::to_string(layer), "docs/drs_table.md lists the statuses; copy the artifact again");
        }
        uint32_t computed = 0;
        for (uint32_t i = 0; i < result[1]; ++i) {
            const uint32_t record = result[2 + i];
            computed |= (record >> 24) == COMPUTE_MLP ? 1u << ((record >> 16) & 31u) : 0u;
        }
        return computed;
    }

    // A row on the device is padded to whole words.
    size_t pitch(const std::string& argument) const {
        return static_cast<size_t>(mlp_.bytes_of(argument)) / static_cast<size_t>(spec_.batch);
    }

    void write_rows(const std::string& argument, const float* rows) {
        const size_t row_bytes = sizeof(float) * static_cast<size_t>(spec_.hidden);
        std::vector<char> padded(mlp_.bytes_of(argument), 0);
        for (size_t row = 0; row < static_cast<size_t>(spec_.batch); ++row) {
            std::memcpy(&padded[row * pitch(argument)], rows + row * static_cast<size_t>(spec_.hidden), row_bytes);
        }
        mlp_.write(argument, padded.data(), padded.size());
    }

    void read_rows(const std::string& argument, float* rows) {
        const size_t row_bytes = sizeof(float) * static_cast<size_t>(spec_.hidden);
        std::vector<char> padded(mlp_.bytes_of(argument));
        mlp_.read(argument, padded.data(), padded.size());
        for (size_t row = 0; row < static_cast<size_t>(spec_.batch); ++row) {
            std::memcpy(rows + row * static_cast<size_t>(spec_.hidden), &padded[row * pitch(argument)], row_bytes);
        }
    }

    AcceleratorSpec spec_;
    Device device_;
    ComputeUnit mlp_;
    ComputeUnit drs_;
    std::vector<std::vector<xrt::bo>> weights_;  // [layer][port]
};

}  // namespace fastcar_host

#endif
