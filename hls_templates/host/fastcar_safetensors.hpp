// Reader of safetensors files in memory (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header
// length, a JSON header, the data. Everything in the header is checked against the file before a byte of data is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fastcar_error.hpp"
#include "fastcar_json.hpp"

namespace fastcar_host {

// One tensor: `bytes` bytes from `first` on, counted from the start of the file.
struct TensorInfo {
    std::string dtype;
    std::vector<int64_t> shape;
    uint64_t first = 0;
    uint64_t bytes = 0;
};

// Bytes of one element; 0 for a type that is not known.
inline uint64_t dtype_bytes(const std::string& dtype) {
    static const std::map<std::string, uint64_t> sizes = {{"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"I16", 2}, {"F16", 2},
                                                          {"BF16", 2}, {"I32", 4}, {"F32", 4}, {"I64", 8}, {"F64", 8}};
    const auto found = sizes.find(dtype);
    return found == sizes.end() ? 0 : found->second;
}

// The tensors of a header; other fields of a tensor are not read. Throws Error or a JSON exception: it is no such header.
inline std::map<std::string, TensorInfo> parse_header(const std::string& text, const std::string& where) {
    std::map<std::string, TensorInfo> tensors;
    const nlohmann::json header = parse_json(text, where);
    for (const auto& item : header.get_ref<const nlohmann::json::object_t&>()) {
        if (item.first == "__metadata__") continue;
        TensorInfo& info = tensors[item.first];
        info.dtype = item.second.at("dtype").get<std::string>();
        for (const nlohmann::json& extent : item.second.at("shape")) {
            info.shape.push_back(static_cast<int64_t>(whole_number(extent, where)));
        }
        const nlohmann::json& offsets = item.second.at("data_offsets");
        info.first = whole_number(offsets.at(0), where);
        info.bytes = whole_number(offsets.at(1), where) - info.first;
    }
    return tensors;
}

class Safetensors {
public:
    // `data`: the file's bytes, which outlive this object; `path`: the file in errors.
    // Throws Error: the file is damaged, or names bytes that it does not have.
    Safetensors(const std::string& path, const char* data, uint64_t size) : path_(path), data_(data) {
        unsigned char prefix[8] = {};
        if (size < sizeof(prefix)) damaged("it has no header");
        std::memcpy(prefix, data, sizeof(prefix));
        uint64_t length = 0;
        for (int i = 7; i >= 0; --i) length = length << 8 | prefix[i];
        if (length > size - sizeof(prefix) || length > MAX_HEADER) damaged("its header is longer than the file");
        const std::string header(data + sizeof(prefix), length);
        try {
            tensors_ = parse_header(header, path);
        } catch (const nlohmann::json::exception& error) {
            damaged(error.what());
        }
        check(sizeof(prefix) + length, size);
    }

    // Throws Error: no such tensor.
    const TensorInfo& info(const std::string& name) const {
        const auto found = tensors_.find(name);
        if (found == tensors_.end()) {
            throw Error("there is no tensor `" + name + "`", path_, "use the files of one artifact together");
        }
        return found->second;
    }

    // Bytes `first` .. `first + bytes` of a tensor. Throws Error: they are not all in it.
    void read(const std::string& name, uint64_t first, void* to, uint64_t bytes) const {
        const TensorInfo& tensor = info(name);
        if (first > tensor.bytes || bytes > tensor.bytes - first) {
            throw Error("`" + name + "` has " + std::to_string(tensor.bytes) + " bytes, but " + std::to_string(bytes) +
                            " from byte " + std::to_string(first) + " on are needed",
                        path_, "use the files of one artifact together");
        }
        if (bytes > 0) {  // of a tensor without elements, `to` may be null
            std::memcpy(to, data_ + tensor.first + first, bytes);
        }
    }

private:
    static constexpr uint64_t MAX_HEADER = 100u << 20;  // as the format's own reader

    [[noreturn]] void damaged(const std::string& why) const {
        throw Error("the file is no valid safetensors file: " + why, path_, "copy the artifact again");
    }

    void check(uint64_t data, uint64_t size) {
        for (auto& entry : tensors_) {
            TensorInfo& tensor = entry.second;
            uint64_t bytes = dtype_bytes(tensor.dtype);
            if (bytes == 0) damaged("`" + entry.first + "` has the unknown type " + tensor.dtype);
            for (const int64_t extent : tensor.shape) {
                if (extent != 0 && bytes > size / static_cast<uint64_t>(extent)) {
                    damaged("`" + entry.first + "` is larger than the file");
                }
                bytes *= static_cast<uint64_t>(extent);
            }
            if (bytes != tensor.bytes || tensor.first > size - data || bytes > size - data - tensor.first) {
                damaged("`" + entry.first + "` does not fit its place");
            }
            tensor.first += data;
        }
    }

    std::string path_;
    const char* data_;
    std::map<std::string, TensorInfo> tensors_;
};

}  // namespace fastcar_host
