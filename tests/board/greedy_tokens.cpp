// generate() over a decoder whose logits are given: for each case its name, then the tokens or the error, in one line.
#include <cmath>
#include <iostream>
#include <vector>

#include "fastcar_sampling.hpp"

using fastcar_host::Logits;

// The same logits at every position, but for one.
struct Given {
    std::vector<float> usual, other;
    int64_t place, position = 0;

    void reset() { position = 0; }
    Logits prefill(const int64_t*, int64_t count) { return at(position += count); }
    Logits step(const int64_t*, int64_t) { return at(position += 1); }
    void accept(int64_t) {}
    Logits at(int64_t end) const { return {(end - 1 == place ? other : usual).data(), 3, 0}; }
};

int main() {
    const fastcar_host::DecoderSpec spec;
    const float low = -INFINITY, plain[] = {0, 2, 1, 1, 0, 2};
    const std::vector<float> usual(plain, plain + 6);
    const std::vector<std::vector<float>> cases = {
        {low, low, 1, low, low, low}, {0, 1, NAN, 0, 1, 2}, {0, 1, 2, NAN, 1, 2}, {low, 0, low, INFINITY, 9, INFINITY}, {low, low, 0, low, 0, low}};
    for (const auto& other : cases) {
        Given decoder{usual, other, 4};
        try {
            for (const auto& row : fastcar_host::generate(decoder, spec, {{0, 0, 0}, {0, 0, 0}}, 4)) {
                for (const int64_t token : row) std::cout << token << ' ';
            }
        } catch (const fastcar_host::Error& error) {
            const std::string text = error.what();
            std::cout << text.substr(0, text.find("\n  hint"));
        }
        std::cout << '|';
    }
}
