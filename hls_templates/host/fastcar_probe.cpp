// What the weight ports of a board read per second, each alone and all together, and what a call costs.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "fastcar_arguments.hpp"
#include "fastcar_xrt.hpp"

namespace fastcar_host {

// One weight port: its memory and the checksum of what is in it.
struct ProbedPort {
    std::string name;
    uint32_t checksum;
};

// Fills a port's buffer with words that differ; as fastcar_probe.hpp sums them up.
inline uint32_t fill_port(xrt::bo& buffer, uint64_t bytes, uint32_t seed) {
    char* memory = buffer.map<char*>();
    uint32_t state = 2463534242u + seed, sum = 0;
    for (uint64_t word = 0; word < bytes; word += PROBE_WORD_BYTES) {
        uint32_t lanes = 0;
        for (uint64_t byte = 0; byte < PROBE_WORD_BYTES; byte += sizeof(state)) {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            std::memcpy(memory + word + byte, &state, sizeof(state));
            lanes ^= state;
        }
        sum = ((sum << 1) | (sum >> 31)) + lanes;
    }
    buffer.sync(XCL_BO_SYNC_BO_TO_DEVICE);
    return sum;
}

// The kernel on a device, with a buffer of `bytes` bytes on every port.
class Probe {
public:
    Probe(const Device& device, uint64_t bytes) : unit_(device, {probe_spec()}), bytes_(bytes) {
        for (const std::string& name : unit_.weights()) {
            xrt::bo buffer = unit_.make_buffer(name, bytes);
            ports_.push_back({name, fill_port(buffer, bytes, static_cast<uint32_t>(ports_.size()))});
            unit_.bind(name, buffer);
        }
    }

    const std::vector<ProbedPort>& ports() const { return ports_; }

    // The least time of `repeats` runs, seconds. Throws Error: a checksum is wrong.
    double seconds(uint32_t chosen, uint64_t bytes, int64_t repeats) {
        double least = 0.0;
        for (int64_t i = 0; i < repeats; ++i) {
            unit_.set("words", static_cast<uint32_t>(bytes / PROBE_WORD_BYTES));
            unit_.set("ports", chosen);
            const auto start = std::chrono::steady_clock::now();
            unit_.run();
            const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            least = i == 0 || taken < least ? taken : least;
        }
        if (bytes == bytes_) check(chosen);
        return least;
    }

private:
    void check(uint32_t chosen) {
        Mapped result = unit_.map("result");
        result.from_device(ports_.size() * sizeof(uint32_t));
        const uint32_t* sums = result.as<uint32_t>();
        for (size_t p = 0; p < ports_.size(); ++p) {
            if ((chosen >> p & 1u) != 0 && sums[p] != ports_[p].checksum) {
                throw Error("the port read other words than were written", ports_[p].name,
                            "check the `sp=` lines of probe_link.cfg against the platform");
            }
        }
    }

    ComputeUnit unit_;
    uint64_t bytes_;
    std::vector<ProbedPort> ports_;
};

inline void print_rate(const std::string& name, double bytes, double seconds) {
    std::printf("%s: %.3f GB/s\n", name.c_str(), bytes / seconds / 1e9);
}

inline void measure(Probe& probe, uint64_t bytes, int64_t repeats) {
    std::printf("empty call: %.1f us\n", 1e6 * probe.seconds(0, 0, repeats));
    uint32_t all = 0;
    for (size_t p = 0; p < probe.ports().size(); ++p) {
        all |= 1u << p;
        print_rate(probe.ports()[p].name, static_cast<double>(bytes), probe.seconds(1u << p, bytes, repeats));
    }
    const double together = static_cast<double>(bytes * probe.ports().size());
    print_rate("all " + std::to_string(probe.ports().size()), together, probe.seconds(all, bytes, repeats));
}

}  // namespace fastcar_host

int main(int count, char** words) {
    using namespace fastcar_host;
    return run_program([&] {
        const std::string usage = "fastcar_probe --xclbin FILE [--megabytes 16] [--repeats 10] [--device 0] "
                                  "[--meminfo /proc/meminfo]";
        const std::vector<std::string> known = {"--xclbin", "--megabytes", "--repeats", "--device", "--meminfo"};
        const Arguments arguments = parse_arguments(count, words, known, "--xclbin", usage);
        const int64_t megabytes = arguments.integer("--megabytes", 16), repeats = arguments.integer("--repeats", 10);
        if (megabytes < 1 || megabytes > 256 || repeats < 1) {
            throw Error("--megabytes is 1 to 256, --repeats at least 1", "", usage);
        }
        const uint64_t bytes = static_cast<uint64_t>(megabytes) << 20;
        Device device(static_cast<unsigned>(arguments.integer("--device", 0)), arguments.options.at("--xclbin"), {probe_spec()});
        if (accelerator_spec().shared_memory) {
            require_contiguous(bytes * PROBE_PORTS, arguments.text("--meminfo", MEMINFO));
        }
        Probe probe(device, bytes);
        measure(probe, bytes, repeats);
    });
}
