// Reader of safetensors files in memory (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header
// length, a JSON header, the data. Everything in the header is checked against the file before a byte of data is read.
#ifndef FASTCAR_SAFETENSORS_HPP
#define FASTCAR_SAFETENSORS_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fastcar_error.hpp"

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

// The JSON that a safetensors header may hold: one object of flat objects. Anything else is refused.
class HeaderParser {
public:
    explicit HeaderParser(const std::string& text) : text_(text) {}

    std::map<std::string, TensorInfo> parse() {
        std::map<std::string, TensorInfo> tensors;
        members([&](const std::string& name) {
            if (name == "__metadata__") {
                members([&](const std::string&) { string(); });
            } else if (!tensors.emplace(name, tensor()).second) {
                fail("the tensor `" + name + "` twice");
            }
        });
        blanks();
        if (at_ != text_.size()) {
            fail("text after the header");
        }
        return tensors;
    }

private:
    [[noreturn]] void fail(const std::string& what) const {
        throw Error("the header has " + what + " at byte " + std::to_string(at_), "", "");
    }

    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    void blanks() {
        while (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t') {
            ++at_;
        }
    }

    bool accept(char wanted) {
        blanks();
        const bool found = at_ < text_.size() && text_[at_] == wanted;
        at_ += found ? 1 : 0;
        return found;
    }

    void expect(char wanted) {
        if (!accept(wanted)) {
            fail(std::string("no `") + wanted + "`");
        }
    }

    // `{ "key": <what read(key) consumes>, ... }`
    template <class Read>
    void members(Read read) {
        expect('{');
        if (accept('}')) {
            return;
        }
        do {
            const std::string key = string();
            expect(':');
            read(key);
        } while (accept(','));
        expect('}');
    }

    std::string string() {
        expect('"');
        std::string value;
        while (peek() != '"') {
            const char c = peek();
            if (static_cast<unsigned char>(c) < 0x20) {
                fail("a string without end");
            }
            ++at_;
            value += c == '\\' ? escaped() : c;
        }
        ++at_;
        return value;
    }

    char escaped() {
        static const std::string codes = "\"\\/bfnrt", meaning = "\"\\/\b\f\n\r\t";
        const size_t which = at_ < text_.size() ? codes.find(text_[at_]) : std::string::npos;
        if (which == std::string::npos) {
            fail("an escape that tensor names do not need");
        }
        ++at_;
        return meaning[which];
    }

    uint64_t number() {
        blanks();
        const size_t start = at_;
        uint64_t value = 0;
        while (peek() >= '0' && peek() <= '9') {
            if (value > (UINT64_MAX >> 1) / 10) {
                fail("a number that is too large");
            }
            value = 10 * value + static_cast<uint64_t>(peek() - '0');
            ++at_;
        }
        if (at_ == start) {
            fail("no number");
        }
        return value;
    }

    std::vector<uint64_t> numbers() {
        std::vector<uint64_t> values;
        expect('[');
        if (accept(']')) {
            return values;
        }
        do {
            values.push_back(number());
        } while (accept(','));
        expect(']');
        return values;
    }

    TensorInfo tensor() {
        TensorInfo info;
        std::vector<uint64_t> offsets;
        members([&](const std::string& key) {
            if (key == "dtype") {
                info.dtype = string();
            } else if (key == "shape") {
                const std::vector<uint64_t> shape = numbers();
                info.shape.assign(shape.begin(), shape.end());
            } else if (key == "data_offsets") {
                offsets = numbers();
            } else {
                fail("the unknown key `" + key + "`");
            }
        });
        if (offsets.size() != 2 || offsets[0] > offsets[1]) {
            fail("no valid data_offsets");
        }
        info.first = offsets[0];
        info.bytes = offsets[1] - offsets[0];
        return info;
    }

    const std::string& text_;
    size_t at_ = 0;
};

class Safetensors {
public:
    // `data`: the file's bytes, which outlive this object; `path`: the file in errors.
    // Throws Error: the file is damaged, or names bytes that it does not have.
    Safetensors(const std::string& path, const char* data, uint64_t size) : path_(path), data_(data) {
        unsigned char prefix[8] = {};
        if (size < sizeof(prefix)) {
            damaged("it has no header");
        }
        std::memcpy(prefix, data, sizeof(prefix));
        uint64_t length = 0;
        for (int i = 7; i >= 0; --i) {
            length = length << 8 | prefix[i];
        }
        if (length > size - sizeof(prefix) || length > MAX_HEADER) {
            damaged("its header is longer than the file");
        }
        const std::string header(data + sizeof(prefix), length);
        try {
            tensors_ = HeaderParser(header).parse();
        } catch (const Error& error) {
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
            if (bytes == 0) {
                damaged("`" + entry.first + "` has the unknown type " + tensor.dtype);
            }
            for (const int64_t extent : tensor.shape) {
                if (extent > 0 && bytes > size / static_cast<uint64_t>(extent)) {
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

#endif
