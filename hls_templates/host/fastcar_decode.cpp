// Decodes greedily on the CPU: tokens of every row on stdout, a line each; the replay ratio on stderr.
#include "fastcar_decoder.hpp"
#include "fastcar_trust.hpp"

int main(int count, char** words) {
    using namespace fastcar_host;
    return run_program([&] {
        const std::string usage = "fastcar_decode ARTIFACT --prompt 16,3 [--prompt IDS ...] [--num-tokens 256] " +
                                  std::string(TRUST_USAGE);
        const Arguments arguments =
            parse_arguments(count, words, {"--prompt", "--num-tokens", "--digest", "--public-key"}, "", usage);
        const DecoderSpec spec = decoder_spec();
        Artifact artifact(arguments.artifact, trust_of(arguments), spec.manifest_schema);
        check_files(artifact, spec);
        Decoder decoder(artifact, spec, false);
        decode(decoder, arguments, spec.batch);
    });
}
