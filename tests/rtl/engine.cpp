// A linear or an MLP of the emitted design twice, for ctypes: by the processes of the emitted C++, and by the RTL, whose AXI ports meet a
// memory with latency, a shared rate and refreshes. The caller compares; this file only runs.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "Vfastcar_engine.h"
#include "fastcar_config.hpp"
#include "fastcar_engine_processes.hpp"

using namespace fastcar;
typedef EngineConfig C;
typedef Shapes<C> S;

// A memory: words of 128 bits per clock for all ports together, clocks from a request to its first word, clocks from one refresh
// to the next and of one, in which nothing moves; of a thousand clocks, those in which the port of the result is not ready.
struct Memory {
    double rate;
    int32_t latency;
    int32_t refresh_interval;
    int32_t refresh;
    int32_t held;
};

// A read port: requests in order, each with the clock of its first word.
struct ReadPort {
    const char* base;
    uint64_t address;
    int bytes;
    struct Burst {
        const char* at;
        int beats;
        int64_t from;
    };
    std::deque<Burst> bursts;
    bool shown;
    bool wishes(int64_t now) const { return !bursts.empty() && bursts.front().from <= now; }
};

static const int AXI = C::PORTS / C::AXI_WORDS, BEAT = 16 * C::AXI_WORDS;
static const uint64_t X_AT = 0x10000000, Y_AT = 0x20000FF0, W_AT = 0x100000000;
static const int RESET_CLOCKS = 64;

class Run {
public:
    Run(const word_t* x, const word_t* weights, const Call& call, const Memory& memory, word_t* y)
        : call_(call), memory_(memory), y_(reinterpret_cast<char*>(y)), random_(1) {
        const int section = (call.words + 255) / 256 * 256;
        for (int a = 0; a < AXI; ++a) {
            const char* own = reinterpret_cast<const char*>(weights) + static_cast<size_t>(a) * section * BEAT;
            ports_.push_back(ReadPort{own, W_AT * (a + 1), BEAT, {}, false});
        }
        ports_.push_back(ReadPort{reinterpret_cast<const char*>(x), X_AT, 16, {}, false});
    }

    // Returns false where the RTL did not end. clocks: to the last word written.
    bool run(int passes, int64_t* clocks) {
        set_call(passes);
        for (int i = 0; i < RESET_CLOCKS; ++i) clock(true, false);
        now_ = 0;
        const int64_t most = 1000000 + 64ll * call_.words * passes;
        bool started = false;
        while (!started || dut_.busy) {
            clock(false, !started);
            started = true;
            if (now_ > most) return false;
        }
        *clocks = last_write_;
        return true;
    }

private:
    void set_call(int passes) {
        const Product& p = call_.last;
        dut_.computing = call_.computing;
        dut_.rows = __builtin_popcount(call_.computing);
        dut_.passes = passes;
        dut_.mlp = call_.products == 2;
        dut_.row_words = call_.row_words;
        dut_.result_words = call_.result_words;
        dut_.last_inputs = p.inputs;
        dut_.last_channels = p.channels;
        dut_.last_tiles = p.tiles;
        dut_.last_tile = p.tile;
        dut_.last_sums = p.sums;
        dut_.last_channel_words = p.channel_words;
        dut_.last_scale_words = p.scale_words;
        dut_.last_head_words = p.head_words;
        dut_.last_tile_words = p.tile * p.channel_words;
        dut_.last_tile_sums = p.tile * p.sums;
        dut_.last_sum_words = p.sums == 1 ? p.channel_words : 128 / S::LANES;
        dut_.last_scale_rows = p.sums == 1 || p.tile > S::SCALE_ROWS ? p.tile : S::SCALE_ROWS;
        dut_.last_chunk = p.tile * C::PORTS;
        dut_.last_bias = p.bias;
        dut_.words = call_.words;
        uint64_t addresses[AXI];
        for (int a = 0; a < AXI; ++a) addresses[a] = ports_[a].address;
        memcpy(&dut_.weights_address, addresses, sizeof(addresses));
        dut_.input_address = X_AT;
        dut_.output_address = Y_AT;
    }

    bool refreshes() const {
        return memory_.refresh_interval > 0 && now_ % memory_.refresh_interval >= memory_.refresh_interval - memory_.refresh;
    }

    void clock(bool reset, bool start) {
        dut_.reset = reset;
        dut_.start = start;
        credit_ = std::min(credit_ + (refreshes() ? 0.0 : memory_.rate), memory_.rate + C::PORTS);
        // Where a port is slower than its reads, they would never leave a part of the rate: writes come first.
        const bool free = !refreshes() && credit_ >= 1 && static_cast<int>(random_() % 1000) >= memory_.held;
        dut_.y_aw_ready = free;
        dut_.y_w_ready = free;
        if (free && dut_.y_w_valid) credit_ -= 1;
        show_words();
        dut_.y_b_valid = !answers_.empty() && answers_.front() <= now_;
        dut_.w_ar_ready = (1u << AXI) - 1;
        dut_.x_ar_ready = 1;
        dut_.clk = 0;
        dut_.eval();
        if (!reset) take_words();
        dut_.clk = 1;
        dut_.eval();
        ++now_;
    }

    // Every port that has its first word and a part of the rate shows a beat. The port behind the last one that did comes first.
    void show_words() {
        uint32_t valid = 0, last = 0;
        const int count = static_cast<int>(ports_.size()), from = turn_;
        for (int i = 0; i < count; ++i) {
            const int a = (from + i) % count;
            ReadPort& port = ports_[a];
            const int words = port.bytes / 16;
            if (!port.wishes(now_) || (!port.shown && (refreshes() || credit_ < words))) continue;
            if (!port.shown) {
                credit_ -= words;
                turn_ = (a + 1) % count;
            }
            port.shown = true;
            const ReadPort::Burst& burst = port.bursts.front();
            char* to = a == count - 1 ? reinterpret_cast<char*>(&dut_.x_r_data) : reinterpret_cast<char*>(&dut_.w_r_data) + a * BEAT;
            memcpy(to, burst.at, port.bytes);
            valid |= 1u << a;
            last |= burst.beats == 1 ? 1u << a : 0u;
        }
        dut_.w_r_valid = valid & ((1u << AXI) - 1);
        dut_.w_r_last = last & ((1u << AXI) - 1);
        dut_.x_r_valid = valid >> AXI & 1u;
        dut_.x_r_last = last >> AXI & 1u;
    }

    void take_words() {
        for (size_t a = 0; a < ports_.size(); ++a) {
            const bool x = a == ports_.size() - 1;
            ReadPort& port = ports_[a];
            if (port.shown && (x ? dut_.x_r_ready : dut_.w_r_ready >> a & 1u)) {
                ReadPort::Burst& burst = port.bursts.front();
                burst.at += port.bytes;
                if (--burst.beats == 0) port.bursts.pop_front();
                port.shown = false;
            }
            if (x ? dut_.x_ar_valid : dut_.w_ar_valid >> a & 1u) {
                uint64_t address = dut_.x_ar_address;
                uint8_t length = dut_.x_ar_length;
                if (!x) {
                    memcpy(&address, reinterpret_cast<const char*>(&dut_.w_ar_address) + 8 * a, 8);
                    memcpy(&length, reinterpret_cast<const char*>(&dut_.w_ar_length) + a, 1);
                }
                check(address, (length + 1) * port.bytes, 4096);
                port.bursts.push_back({port.base + (address - port.address), length + 1, now_ + memory_.latency});
                if (port.bursts.size() > 4) abort();
            }
        }
        if (dut_.y_b_valid && dut_.y_b_ready) answers_.pop_front();
        if (dut_.y_aw_valid && dut_.y_aw_ready) {
            check(dut_.y_aw_address, 16 * (dut_.y_aw_length + 1), 1024);
            writes_.push_back({dut_.y_aw_address, dut_.y_aw_length + 1});
        }
        if (dut_.y_w_valid && dut_.y_w_ready) {
            // Data may come before their address is taken, but not before it is asked for.
            if (!fetches_) abort();
            last_write_ = now_ + 1;
            data_.push_back({});
            memcpy(data_.back().bytes, &dut_.y_w_data, 16);
            data_.back().last = dut_.y_w_last;
        }
        store();
        fetches_ |= dut_.fetching != 0;
    }

    void store() {
        while (!writes_.empty() && !data_.empty()) {
            memcpy(y_ + (writes_.front().address - Y_AT), data_.front().bytes, 16);
            writes_.front().address += 16;
            if ((--writes_.front().beats == 0) != data_.front().last) abort();
            if (data_.front().last) {
                writes_.pop_front();
                answers_.push_back(now_ + memory_.latency);
            }
            data_.pop_front();
        }
    }

    static void check(uint64_t address, int bytes, int most) {
        const bool crosses = address / 4096 != (address + bytes - 1) / 4096;
        if (bytes > most || crosses || address % 16 != 0) abort();
    }

    struct Write {
        uint64_t address;
        int beats;
    };
    struct Data {
        char bytes[16];
        bool last;
    };
    Vfastcar_engine dut_;
    const Call& call_;
    const Memory& memory_;
    char* y_;
    std::mt19937 random_;
    std::vector<ReadPort> ports_;
    std::deque<Write> writes_;
    std::deque<Data> data_;
    std::deque<int64_t> answers_;
    double credit_ = 0;
    int64_t now_ = 0, last_write_ = 0;
    int turn_ = 0;
    bool fetches_ = false;
};

// The same by the emitted processes.
static void run_processes(const word_t* x, const word_t* weights, const Call& call, const core_t* core_of, const pass_t* pass_of,
                          int passes, word_t* y) {
    typedef Beat<C::AXI_WORDS>::Type beat_t;
    hls::stream<word_t> in, out, words[C::PORTS];
    hls::stream<beat_t> beats[AXI];
    const int section = (call.words + 255) / 256 * 256;
    read_rows<C>(x, call.computing, call.row_words, in);
    for (int a = 0; a < AXI; ++a) {
        read_weights<C>(reinterpret_cast<const beat_t*>(weights) + static_cast<size_t>(a) * section, 0, call.words, beats[a]);
    }
    share_weights<C>(beats, call.words, words);
    const Product &p = call.last, &f = call.first;
    const float gain[INDEX_REGISTER_BITS] = {};
    compute<C>(in, words, core_of, pass_of, call.computing, call.last_rows, passes, passes, call.products, f.channels, f.tile,
               f.tiles, f.scale_words, f.head_words, f.activated, f.bias, p.inputs, p.channels, p.tile, p.tiles, p.sums,
               p.channel_words, p.scale_words, p.head_words, p.bias, gain, out);
    write_rows<C>(call.computing, p.tiles, p.tile * C::PORTS / FLOAT_LANES, call.result_words, out, y);
}

// x: rows of row_words words; weights: the stream of the call, at an address of whole beats; rows of y that do not compute stay.
// Returns 0 where the engine refuses the request, -1 where the RTL does not end, else 1.
extern "C" int fastcar_rtl_engine(const void* x, const void* weights, uint32_t mask, uint32_t op, int32_t inputs, int32_t channels,
                                  int32_t tile, int32_t tiles, const Memory* memory, void* y_rtl, void* y_cpp, int64_t* clocks) {
    const Call call = decode<C>(mask, op, inputs, channels, tile, tiles);
    if (call.products == 0) return 0;
    core_t core_of[INDEX_REGISTER_BITS];
    pass_t pass_of[INDEX_REGISTER_BITS];
    const int passes = place_rows<PLACE_BITS>(call.computing, C::BATCH, C::CORES, core_of, pass_of);
    const word_t *rows = static_cast<const word_t*>(x), *stream = static_cast<const word_t*>(weights);
    run_processes(rows, stream, call, core_of, pass_of, passes, static_cast<word_t*>(y_cpp));
    Run run(rows, stream, call, *memory, static_cast<word_t*>(y_rtl));
    return run.run(passes, clocks) ? 1 : -1;
}
