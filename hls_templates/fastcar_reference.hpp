// A plain MLP in float32 and exact integers, written without the kernel's sources: what the test benches compare with.
// Not synthesised.
#ifndef FASTCAR_REFERENCE_HPP
#define FASTCAR_REFERENCE_HPP

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <string>
#include <vector>

namespace fastcar_reference {

class Random {
   public:
    explicit Random(uint32_t seed) : state_(seed) {}
    int integer(int low, int high) {
        state_ = state_ * 1664525u + 1013904223u;
        return low + static_cast<int>((state_ >> 8) % static_cast<uint32_t>(high - low + 1));
    }

   private:
    uint32_t state_;
};

// One linear: weight [channels][padded inputs]; a scale per channel (float32) or per group of 128 (bits of a float16).
struct Matrix {
    int channels, inputs, bits;
    std::vector<int8_t> weight;
    std::vector<float> scale;
    std::vector<uint16_t> half;
    std::vector<float> bias;

    Matrix(int n, int k, int weight_bits, bool with_bias, Random& random)
        : channels(n), inputs(k), bits(weight_bits), weight(n * padded()), scale(n), half(n * groups()), bias(with_bias ? n : 0) {
        const int most = bits == 8 ? 127 : 7;
        for (int c = 0; c < n; ++c) {
            for (int i = 0; i < k; ++i) weight[c * padded() + i] = static_cast<int8_t>(random.integer(-most, most));
        }
        for (float& s : scale) s = static_cast<float>(random.integer(1, 1000)) * 1e-5f;
        for (uint16_t& h : half) h = static_cast<uint16_t>(random.integer(0x0400, 0x2FFF));  // 2^-14 to 0.125
        for (float& b : bias) b = static_cast<float>(random.integer(-2000, 2000)) * 1e-3f;
    }
    int groups() const { return bits == 8 ? 1 : (inputs + 127) / 128; }
    int padded() const { return bits == 8 ? inputs : groups() * 128; }
};

inline float half_to_float(uint16_t bits) {
    return ldexpf(static_cast<float>(1024 + (bits & 1023)), (bits >> 10) - 25);
}

inline float dot(const Matrix& m, const std::vector<int8_t>& q, int channel, float row_scale) {
    float total = 0.0f;
    for (int g = 0; g < m.groups(); ++g) {
        const int end = m.bits == 8 || 128 * (g + 1) > m.inputs ? m.inputs : 128 * (g + 1);
        int32_t acc = 0;
        for (int k = 128 * g * (m.bits == 4); k < end; ++k) acc += q[k] * m.weight[channel * m.padded() + k];
        if (m.bits == 8) {
            const float scale = row_scale * m.scale[channel];
            return static_cast<float>(acc) * scale;
        }
        const float part = static_cast<float>(acc) * half_to_float(m.half[channel * m.groups() + g]);
        total = g == 0 ? part : total + part;
    }
    return total * row_scale;
}

inline std::vector<float> linear(const std::vector<float>& x, const Matrix& m) {
    float amax = 1e-30f;
    for (float v : x) amax = fmaxf(amax, fabsf(v));
    const float inverse = 127.0f / amax;
    std::vector<int8_t> q;
    for (float v : x) q.push_back(static_cast<int8_t>(fminf(127.0f, fmaxf(-127.0f, nearbyintf(v * inverse)))));
    std::vector<float> y(m.channels);
    for (int n = 0; n < m.channels; ++n) {
        y[n] = dot(m, q, n, amax * (1.0f / 127.0f));
        if (!m.bias.empty()) y[n] = y[n] + m.bias[n];
    }
    return y;
}

inline double exact_factor(const std::string& activation, double x) {
    if (activation == "gelu") return 0.5 * erfc(-x / sqrt(2.0));
    const double z = activation == "silu" ? x : 2.0 * sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
    return 1.0 / (1.0 + exp(-z));
}

inline float activate(const std::string& activation, float x) {
    const float positive = x > 0.0f ? x : 0.0f;
    if (activation == "relu") return positive;
    if (activation == "relu2") return positive * positive;
    const float limit = activation == "silu" ? 16.0f : 8.0f;
    const float scaled = fminf(limit, fmaxf(-limit, x)) * (16384.0f / limit);
    const int u = static_cast<int>(nearbyintf(scaled)) + 16384;
    const int i = u / 64 < 511 ? u / 64 : 511;
    const int64_t f = u - 64 * i;
    const int64_t low = llrint(16777216.0 * exact_factor(activation, i * limit / 256.0 - limit));
    const int64_t high = llrint(16777216.0 * exact_factor(activation, (i + 1) * limit / 256.0 - limit));
    return x * (static_cast<float>((low * (64 - f) + high * f + 32) >> 6) / 16777216.0f);
}

// linears: gate, up, down or up, down.
inline std::vector<float> mlp(const std::vector<float>& x, const std::vector<Matrix>& linears,
                              const std::string& activation) {
    std::vector<float> a = linear(x, linears[0]);
    for (float& v : a) v = activate(activation, v);
    if (linears.size() == 3) {
        const std::vector<float> up = linear(x, linears[1]);
        for (size_t n = 0; n < a.size(); ++n) a[n] = a[n] * up[n];
    }
    return linear(a, linears.back());
}

template <class T>
void append(std::vector<uint8_t>& out, const std::vector<T>& values) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(values.data());
    out.insert(out.end(), bytes, bytes + sizeof(T) * values.size());
    out.resize((out.size() + 15) / 16 * 16, 0);
}

// A row's words: int8 as they are; of every 32 int4, the first 16 are the low nibbles.
inline void append_row(std::vector<uint8_t>& out, const Matrix& m, int channel) {
    const int8_t* row = &m.weight[channel * m.padded()];
    if (m.bits == 8) return append(out, std::vector<int8_t>(row, row + m.inputs));
    for (int k = 0; k < m.padded(); ++k) {
        if (k % 32 < 16) out.push_back(static_cast<uint8_t>((row[k] & 15) | ((row[k + 16] & 15) << 4)));
    }
}

// How a product is cut: `tile` rows on each of `ports` ports, `tiles` times.
struct Tiling {
    int channels, tile, tiles, ports;
};

// Appends one port's part of a product: per tile the scales, the biases, then the rows, padded with zeros. Channel c is
// channel c / count of part c % count.
inline void pack_product(const std::vector<const Matrix*>& parts, const Tiling& cut, int port, std::vector<uint8_t>& out) {
    const Matrix& model = *parts[0];
    const int count = static_cast<int>(parts.size()), groups = model.groups();
    const size_t row_bytes = model.bits == 8 ? (model.inputs + 15) / 16 * 16 : groups * 64;
    for (int t = 0; t < cut.tiles; ++t) {
        std::vector<float> scales(cut.tile, 0.0f), biases(cut.tile, 0.0f);
        std::vector<uint16_t> halves(cut.tile * groups, 0);
        std::vector<uint8_t> rows;
        for (int j = 0; j < cut.tile; ++j) {
            const int c = (t * cut.tile + j) * cut.ports + port;
            rows.resize(row_bytes * j, 0);
            if (c >= cut.channels) continue;
            const Matrix& m = *parts[c % count];
            const int n = c / count;
            scales[j] = m.scale[n];
            if (!m.bias.empty()) biases[j] = m.bias[n];
            for (int g = 0; g < groups; ++g) halves[j * groups + g] = m.half[n * groups + g];
            append_row(rows, m, n);
        }
        rows.resize(row_bytes * cut.tile, 0);
        model.bits == 8 ? append(out, scales) : append(out, halves);
        if (!model.bias.empty()) append(out, biases);
        append(out, rows);
    }
}

}  // namespace fastcar_reference

#endif
