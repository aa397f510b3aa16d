// Decodes greedily with the MLPs on the accelerator: tokens of every row on stdout, a line each.
#include <cstdio>

#include "fastcar_offload.hpp"
#include "fastcar_trust.hpp"

int main(int count, char** words) {
    using namespace fastcar_host;
    try {
        const std::string usage = "fastcar_board ARTIFACT --xclbin FILE --prompt 16,3 [--prompt IDS ...] [--num-tokens 256] "
                                  "[--device 0] [--meminfo /proc/meminfo] " + std::string(TRUST_USAGE);
        Arguments arguments =
            parse_arguments(count, words, {"--xclbin", "--device", "--meminfo", "--digest", "--public-key"}, usage);
        if (arguments.options.count("--xclbin") == 0) {
            throw Error("no --xclbin is given", "", usage);
        }
        const int64_t device = arguments.options.count("--device") == 0
                                   ? 0
                                   : parse_integer("--device", arguments.options["--device"]);
        const DecoderSpec spec = decoder_spec();
        const std::string meminfo = arguments.options.count("--meminfo") == 0 ? MEMINFO : arguments.options["--meminfo"];
        Artifact artifact(arguments.artifact, trust_of(arguments), spec.manifest_schema);
        const AcceleratorSpec board = accelerator_spec();
        Decoder::check_files(artifact, spec, {board.weights, board.table});
        Accelerator accelerator(artifact, arguments.options["--xclbin"], static_cast<unsigned>(device), meminfo);
        register_accelerator(accelerator);
        Decoder decoder(artifact, spec, true);
        accelerator.reset();
        print_tokens(decoder.generate(prompt_rows(arguments, spec.batch), arguments.num_tokens));
        std::fprintf(stderr, "replay ratio %.4f\n", decoder.replay_ratio());
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 2;
    }
}
