// The files that a host program reads before it runs: manifest.json, signature.json and weights. Each input is read as all
// three, and as what a signature covers: that is read only where the cryptography holds.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "fastcar_artifact.hpp"
#include "fastcar_safetensors.hpp"

namespace {

using namespace fastcar_host;

// A reader may refuse what it is given with this one error. Whatever else it throws ends the program.
template <class Read>
void accept(Read read) {
    try {
        read();
    } catch (const Error&) {
    }
}

std::string make_folder() {
    char name[] = "/tmp/fastcar-fuzz-XXXXXX";
    if (mkdtemp(name) == nullptr) {
        std::abort();
    }
    return name;
}

const std::string& folder() {
    static const std::string made = make_folder();
    return made;
}

void write_file(const std::string& name, const std::string& bytes) {
    std::ofstream(folder() + "/" + name, std::ios::binary) << bytes;
}

// Every byte of every tensor, and one beyond.
void read_tensors(const std::string& bytes) {
    const Safetensors file("weights", bytes.data(), bytes.size());
    for (const char* name : {"a", "b", "c", "layer.0.w1", "layer.0.b1", ""}) {
        accept([&] {
            const TensorInfo& info = file.info(name);
            std::vector<char> values(info.bytes + 1);
            file.read(name, 0, values.data(), info.bytes);
            file.read(name, 1, values.data(), info.bytes);
        });
    }
}

void read_manifest(const std::string& bytes) {
    write_file("manifest.json", bytes);
    Artifact artifact(folder(), Trust(), 5);
    for (const char* name : {"manifest.json", "host/a.so", "a", "", "../a", "/etc/hostname"}) {
        accept([&] { artifact.check({name}, {}); });
        accept([&] { artifact.check({}, {name}); });
    }
}

const PublicKey& key() {
    static const std::string pem =  // of signers.py
        "-----BEGIN PUBLIC KEY-----\n"
        "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE45S86Mhyj8oQWQcclFnkfsGb0pYm\n"
        "MPJu7DQe5JeuiPcu/xahkXKFML36J5kTsTTNwuusDYla/+H0eSiYTX43zw==\n"
        "-----END PUBLIC KEY-----\n";
    static const std::unique_ptr<PublicKey> read = [] {
        write_file("key.pub", pem);
        return std::make_unique<PublicKey>(folder() + "/key.pub");
    }();
    return *read;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string bytes(reinterpret_cast<const char*>(data), size);
    accept([&] { read_tensors(bytes); });
    accept([&] { read_manifest(bytes); });
    accept([&] { signed_digests(bytes, key(), "signature.json"); });
    accept([&] { digests_of(bytes, "signature.json"); });
    accept([&] { from_base64(bytes, "signature.json"); });
    return 0;
}
