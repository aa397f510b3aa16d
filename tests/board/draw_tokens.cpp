// Draws tokens for a Python process. A request is float64 temperature, int64 top_k, seed, row, position and number of logits, then the
// logits, float32. The answer is the token, int64; before all of them the knots of the noise, float64 [65537].
#include <cstdio>

#include "fastcar_sampling.hpp"

using namespace fastcar_host;

int main() {
    const std::vector<double>& knots = gumbel_knots();
    std::fwrite(knots.data(), sizeof(double), knots.size(), stdout);
    Sampling sampling;
    while (std::fread(&sampling.temperature, sizeof(double), 1, stdin) == 1) {
        int64_t given[5];
        bool whole = std::fread(given, sizeof(int64_t), 5, stdin) == 5;
        sampling.top_k = given[0];
        sampling.seed = static_cast<uint64_t>(given[1]);
        std::vector<float> logits(static_cast<size_t>(given[4]));
        whole = whole && std::fread(logits.data(), sizeof(float), logits.size(), stdin) == logits.size();
        // The logits are those of row `given[2]`, and no other row is asked for.
        const Logits one = {logits.data(), 0, 0};
        const int64_t token = whole ? one.choose(sampling, given[2], given[4], given[3], 0) : -1;
        std::fwrite(&token, sizeof(token), 1, stdout);
    }
}
