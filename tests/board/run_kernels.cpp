// Runs kernels of one library and compares what they write. The file of cases, all integers little-endian: int32 number
// of cases; per case its name (int32 length, characters), int32 number of tensors and how many of them are results, and
// per tensor int32 type code, bits and rank, int64 sizes, the values. The results come last and are as they should be.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

namespace {

struct AlignedMemory {
    void AllocData(DLTensor* tensor) {
        const size_t bytes = (tvm::ffi::GetDataSize(*tensor) + 63) / 64 * 64;
        tensor->data = std::aligned_alloc(64, bytes);
    }
    void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

template <class T>
T read(std::istream& in) {
    T value;
    in.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
}

tvm::ffi::Tensor read_tensor(std::istream& in) {
    const DLDataType type = {static_cast<uint8_t>(read<int32_t>(in)), static_cast<uint8_t>(read<int32_t>(in)), 1};
    std::vector<int64_t> shape(read<int32_t>(in));
    for (int64_t& size : shape) {
        size = read<int64_t>(in);
    }
    const tvm::ffi::ShapeView view(shape.data(), shape.size());
    auto tensor = tvm::ffi::Tensor::FromNDAlloc(AlignedMemory(), view, type, DLDevice{kDLCPU, 0});
    in.read(static_cast<char*>(tensor.data_ptr()), tvm::ffi::GetDataSize(*tensor.GetDLTensorPtr()));
    return tensor;
}

bool run(const tvm::ffi::Module& library, std::istream& in) {
    std::string name(read<int32_t>(in), ' ');
    in.read(&name[0], name.size());
    std::vector<tvm::ffi::Tensor> tensors;
    int32_t left = read<int32_t>(in);
    const size_t first = left - read<int32_t>(in);
    for (; left > 0; --left) {
        tensors.push_back(read_tensor(in));
    }
    std::vector<std::vector<char>> expected;
    for (size_t i = first; i < tensors.size(); ++i) {
        char* values = static_cast<char*>(tensors[i].data_ptr());
        expected.emplace_back(values, values + tvm::ffi::GetDataSize(*tensors[i].GetDLTensorPtr()));
        std::memset(values, 0xff, expected.back().size());
    }
    const std::vector<tvm::ffi::AnyView> arguments(tensors.begin(), tensors.end());
    tvm::ffi::Any result;
    library->GetFunction(name).value().CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
    bool equal = true;
    for (size_t i = first; i < tensors.size(); ++i) {
        const std::vector<char>& right = expected[i - first];
        equal &= std::memcmp(tensors[i].data_ptr(), right.data(), right.size()) == 0;
    }
    std::cout << name << (equal ? " equal" : " differs") << "\n";
    return equal;
}

}  // namespace

int main(int, char** words) {
    const tvm::ffi::Module library = tvm::ffi::Module::LoadFromFile(words[1]);
    std::ifstream in(words[2], std::ios::binary);
    bool equal = true;
    for (int32_t left = read<int32_t>(in); left > 0; --left) {
        equal &= run(library, in);
    }
    return equal ? 0 : 1;
}
