// Decodes greedily on the CPU: tokens of every row on stdout, a line each; the replay ratio on stderr.
#include <cstdio>

#include "fastcar_arguments.hpp"
#include "fastcar_decoder.hpp"

int main(int count, char** words) {
    using namespace fastcar_host;
    try {
        const std::string usage = "fastcar_decode ARTIFACT --prompt 16,3 [--prompt IDS ...] [--num-tokens 256]";
        const Arguments arguments = parse_arguments(count, words, {}, usage);
        const DecoderSpec spec = decoder_spec();
        Decoder decoder(arguments.artifact, spec, false);
        print_tokens(decoder.generate(prompt_rows(arguments, spec.batch), arguments.num_tokens));
        std::fprintf(stderr, "replay ratio %.4f\n", decoder.replay_ratio());
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 2;
    }
}
