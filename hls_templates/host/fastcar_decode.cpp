// Decodes on the CPU: tokens of every row on stdout, a line each; the replay ratio on stderr.
#include "fastcar_decoder.hpp"
#include "fastcar_trust.hpp"

int main(int count, char** words) {
    using namespace fastcar_host;
    return run_program([&] {
        const std::string usage = std::string("fastcar_decode ARTIFACT ") + DECODING_USAGE + TRUST_USAGE;
        const Arguments arguments = parse_arguments(count, words, DECODING, "", usage);
        const DecoderSpec spec = decoder_spec();
        Artifact artifact(arguments.artifact, trust_of(arguments), spec.manifest_schema);
        check_files(artifact, spec);
        Decoder decoder(artifact, spec, false);
        decode(decoder, spec, arguments);
    });
}
