// Decodes greedily on the CPU: tokens of every row on stdout, a line each; the replay ratio on stderr.
#include <cstdio>

#include "fastcar_decoder.hpp"
#include "fastcar_trust.hpp"

int main(int count, char** words) {
    using namespace fastcar_host;
    try {
        const std::string usage = "fastcar_decode ARTIFACT --prompt 16,3 [--prompt IDS ...] [--num-tokens 256] " +
                                  std::string(TRUST_USAGE);
        const Arguments arguments = parse_arguments(count, words, {"--digest", "--public-key"}, usage);
        const DecoderSpec spec = decoder_spec();
        Artifact artifact(arguments.artifact, trust_of(arguments), spec.manifest_schema);
        check_files(artifact, spec);
        Decoder decoder(artifact, spec, false);
        print_tokens(decoder.generate(prompt_rows(arguments, spec.batch), arguments.num_tokens));
        std::fprintf(stderr, "replay ratio %.4f\n", decoder.replay_ratio());
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 2;
    }
}
