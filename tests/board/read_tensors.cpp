// Reads every safetensors file named on the command line whole; prints per file its tensors, or why it is refused.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fastcar_safetensors.hpp"

int main(int count, char** words) {
    for (int i = 1; i < count; ++i) {
        try {
            std::ifstream stream(words[i], std::ios::binary);
            const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
            const fastcar_host::Safetensors file(words[i], bytes.data(), bytes.size());
            std::string line = "ok";
            for (const std::string name : {"a", "b \"x\""}) {
                const fastcar_host::TensorInfo& info = file.info(name);
                std::vector<unsigned char> data(info.bytes);
                file.read(name, 0, data.data(), info.bytes);
                unsigned sum = 0;
                for (const unsigned char byte : data) {
                    sum += byte;
                }
                line += " " + info.dtype + "[" + std::to_string(info.shape.size()) + "] " + std::to_string(sum);
            }
            std::printf("%s\n", line.c_str());
        } catch (const fastcar_host::Error& error) {
            std::string text = error.what();
            std::printf("refused %s\n", text.substr(0, text.find("\n  where: ")).c_str());
        }
    }
    return 0;
}
