// Runs the decoder of an artifact for a Python process, forward by forward. A request is int64 count of tokens, position
// and step, then the tokens, int64, and for a single one the thresholds, float32 [L]; a count of 0 clears the states.
// The answer is the logits, and of a single token decisions and scores. Arguments: the artifact, and which library of it.
#include <cstdio>

#include "fastcar_library.hpp"

using namespace fastcar_host;

template <class T>
void read(T* values, size_t count) {
    if (std::fread(values, sizeof(T), count, stdin) != count) {
        std::exit(0);
    }
}

void write(const Tensors& results, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
        std::fwrite(data_of<char>(results.at(name)), 1, tvm::ffi::GetDataSize(results.at(name)), stdout);
    }
    std::fflush(stdout);
}

int main(int, char** words) {
    DecoderSpec spec = decoder_spec();
    spec.library = words[2];
    Artifact artifact(words[1], Trust(), spec.manifest_schema);
    check_files(artifact, spec);
    const tvm::ffi::Module machine = load_machine(artifact, spec);
    const Tensors params = load_params(artifact, spec, {spec.decode, spec.prefill});
    Program decode(machine, spec.decode, params), prefill(machine, spec.prefill, params);
    Tensors feeds;
    for (const char* name : {"position", "step"}) {
        feeds.insert_or_assign(name, make_tensor({1}, "I64"));
    }
    feeds.insert_or_assign("thresholds", make_tensor({spec.layers}, "F32"));
    const tvm::ffi::Tensor one = make_tensor({1, 1}, "I64"), chunk = make_tensor({1, spec.prefill_chunk}, "I64");
    for (;;) {
        int64_t count;
        read(&count, 1);
        read(data_of<int64_t>(feeds.at("position")), 1);
        read(data_of<int64_t>(feeds.at("step")), 1);
        if (count == 0) {
            for (const StateSpec& state : spec.state) {
                feeds.insert_or_assign(state.name, make_tensor(state.shape, state.dtype));
            }
            continue;
        }
        const tvm::ffi::Tensor tokens = count == 1 ? one : chunk;
        read(data_of<int64_t>(tokens), static_cast<size_t>(count));
        feeds.insert_or_assign("tokens", tokens);
        if (count == 1) {
            read(data_of<float>(feeds.at("thresholds")), static_cast<size_t>(spec.layers));
            write(decode(feeds), {"logits", "decisions", "scores"});
        } else {
            write(prefill(feeds), {"logits"});
        }
    }
}
