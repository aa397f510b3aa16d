// The RTL of the engine under its registers and streams, whose AXI ports meet a memory with latency, a shared rate and refreshes. For ctypes: a linear or an
// MLP by the emitted C++ and by the RTL; or with FASTCAR_STEP the emitted kernel of whole steps, whose engine is the RTL. The caller compares.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "Vfastcar_engine.h"
#include "engine_ports.hpp"  // ENGINE_PORTS(dut): the signals of every AXI port; the kernel's signature, and its arguments
#include "fastcar_config.hpp"
#include "fastcar_engine_processes.hpp"
#ifdef FASTCAR_STEP
#include "fastcar_step.cpp"
#endif

using namespace fastcar;
typedef EngineConfig C;
typedef Beat<C::AXI_WORDS>::Type beat_t;
typedef hls::stream<word_t> Stream;

// A memory: words of 128 bits per clock for all ports together, clocks from a request to its first word, clocks from one refresh
// to the next and of one, in which nothing moves; of a thousand clocks, those in which the other end of a stream is not ready.
struct Memory {
    double rate;
    int32_t latency;
    int32_t refresh_interval;
    int32_t refresh;
    int32_t held;
};

static const int AXI = C::PORTS / C::AXI_WORDS, BEAT = 16 * C::AXI_WORDS;
static const int RESET_CLOCKS = 16;  // as many as AMD's reset block gives
static const uint64_t WEIGHTS_AT = 0x100000000, SPAN = 0x10000000000;

#define require(holds) ((holds) ? (void)0 : (fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #holds), abort()))

// Requests in order, each with the clock of its first word.
struct ReadPort {
    Signals signals;
    const char* base;
    uint64_t address;
    struct Burst {
        const char* at;
        int beats;
        int64_t from;
    };
    std::deque<Burst> bursts;
    bool shown;
};

class Engine {
public:
    explicit Engine(const Memory& memory) : memory_(memory), random_(1) {
        for (int a = 0; a < AXI; ++a) ports_.push_back(ReadPort{ENGINE_PORTS(dut_)[a], nullptr, SPAN * a + WEIGHTS_AT, {}, false});
        dut_.ap_rst_n = 0;
        for (int i = 0; i < RESET_CLOCKS; ++i) clock();
        dut_.ap_rst_n = 1;
        clock();  // the reset has a register
        for (uint32_t offset : {0x04, 0x08}) write(offset, 1);
        require(read(0) == 4);
    }

    // A launch, as XRT does one.
    void start(const std::vector<const void*>& sections) {
        for (int a = 0; a < AXI; ++a) {
            ports_[a].base = static_cast<const char*>(sections[a]);
            write(0x10 + 12 * a, static_cast<uint32_t>(ports_[a].address));
            write(0x14 + 12 * a, static_cast<uint32_t>(ports_[a].address >> 32));
            require(read(0x14 + 12 * a) == ports_[a].address >> 32);
        }
        write(0, 1);
        require((read(0) & 7) == 1);
    }

    // Sends a call; returns when the words of its results are there. The call of no products ends the launch.
    void serve(Stream& calls, Stream& results) {
        const word_t first = calls.read();
        size_t words = lane_bits(first, 0) == 0 ? 0 : static_cast<size_t>(lane_bits(first, 1)) * lane_bits(first, 3);
        const int64_t most = now_ + 1000000 + 4096 * static_cast<int64_t>(words + calls.size());
        int64_t from = 0;
        calls_.push_back(first);
        while (!calls.empty()) calls_.push_back(calls.read());
        const bool ends = words == 0;
        while (words != 0 || !calls_.empty()) {
            require(now_ < most);
            if (from == 0 && dut_.calls_tready) from = now_;
            clock();
            for (; !results_.empty(); results_.pop_front(), --words) results.write(results_.front());
        }
        if (!ends) {
            clocks += now_ - from;
            return;
        }
        require(dut_.__SYM__interrupt && (read(0) & 6) == 6 && (read(0) & 6) == 4);
        write(0x0C, 1);
        require(!dut_.__SYM__interrupt);
    }

    int64_t clocks = 0;  // of all calls: from the first word of one to the last one of its results

private:
    void write(uint32_t offset, uint32_t value) {
        dut_.s_axi_control_awaddr = offset;
        dut_.s_axi_control_wdata = value;
        dut_.s_axi_control_wstrb = 0xF;
        dut_.s_axi_control_awvalid = dut_.s_axi_control_wvalid = dut_.s_axi_control_bready = 1;
        clock();
        dut_.s_axi_control_awvalid = dut_.s_axi_control_wvalid = 0;
        require(dut_.s_axi_control_bvalid && dut_.s_axi_control_bresp == 0);
        clock();
    }

    uint32_t read(uint32_t offset) {
        dut_.s_axi_control_araddr = offset;
        dut_.s_axi_control_arvalid = dut_.s_axi_control_rready = 1;
        clock();
        dut_.s_axi_control_arvalid = 0;
        require(dut_.s_axi_control_rvalid && dut_.s_axi_control_rresp == 0);
        const uint32_t value = dut_.s_axi_control_rdata;
        clock();
        return value;
    }

    bool refreshes() const {
        return memory_.refresh_interval > 0 && now_ % memory_.refresh_interval >= memory_.refresh_interval - memory_.refresh;
    }

    bool held() { return static_cast<int>(random_() % 1000) < memory_.held; }

    void clock() {
        credit_ = std::min(credit_ + (refreshes() ? 0.0 : memory_.rate), memory_.rate + C::PORTS);
        show_words();
        // A word that is shown stays until it is taken.
        shown_ = !calls_.empty() && (shown_ || !held());
        dut_.calls_tvalid = shown_;
        if (shown_) memcpy(&dut_.calls_tdata, &calls_.front(), 16);
        dut_.results_tready = !held();
        for (ReadPort& port : ports_) *port.signals.arready = 1;
        dut_.ap_clk = 0;
        dut_.eval();
        if (dut_.ap_rst_n) take_words();
        dut_.ap_clk = 1;
        dut_.eval();
        ++now_;
    }

    // Every port that has its first word and a part of the rate shows a beat. The port behind the last one that did comes first.
    void show_words() {
        const int from = turn_;
        for (int i = 0; i < AXI; ++i) {
            const int a = (from + i) % AXI;
            ReadPort& port = ports_[a];
            const bool wishes = !port.bursts.empty() && port.bursts.front().from <= now_;
            if (wishes && !port.shown && !refreshes() && credit_ >= C::AXI_WORDS) {
                credit_ -= C::AXI_WORDS;
                turn_ = (a + 1) % AXI;
                port.shown = true;
                memcpy(port.signals.rdata, port.bursts.front().at, BEAT);
            }
            *port.signals.rvalid = port.shown;
            *port.signals.rlast = port.shown && port.bursts.front().beats == 1;
        }
    }

    void take_words() {
        for (ReadPort& port : ports_) {
            if (port.shown && *port.signals.rready) {
                ReadPort::Burst& burst = port.bursts.front();
                burst.at += BEAT;
                if (--burst.beats == 0) port.bursts.pop_front();
                port.shown = false;
            }
            if (*port.signals.arvalid) {
                const uint64_t address = *port.signals.araddr;
                const int beats = *port.signals.arlen + 1;
                require(address / 4096 == (address + beats * BEAT - 1) / 4096 && address % BEAT == 0);
                require(1 << *port.signals.arsize == BEAT && *port.signals.arburst == 1);
                port.bursts.push_back({port.base + (address - port.address), beats, now_ + memory_.latency});
                require(port.bursts.size() <= 4);
            }
        }
        if (shown_ && dut_.calls_tready) {
            calls_.pop_front();
            shown_ = false;
        }
        if (dut_.results_tvalid && dut_.results_tready) {
            results_.emplace_back();
            memcpy(static_cast<void*>(&results_.back()), &dut_.results_tdata, 16);
        }
    }

    Vfastcar_engine dut_;
    const Memory memory_;
    std::mt19937 random_;
    std::vector<ReadPort> ports_;
    std::deque<word_t> calls_, results_;
    double credit_ = 0;
    int64_t now_ = 0;
    int turn_ = 0;
    bool shown_ = false;
};

#ifdef FASTCAR_STEP

// What stands in fastcar_engine.cpp, by the RTL. The caller sets the memory before the first launch.
extern "C" {
Memory fastcar_memory;
int64_t fastcar_clocks = 0;
}

static Engine& engine() {
    static Engine only(fastcar_memory);
    return only;
}

namespace fastcar {
Stream calls, results;
void serve_calls() {
    engine().serve(calls, results);
    fastcar_clocks = engine().clocks;
}
}  // namespace fastcar

extern "C" ENGINE_SIGNATURE { engine().start(ENGINE_SECTIONS); }

#else

// x: rows of row_words words; weights: the stream of the call, at an address of whole beats; rows of y that do not compute stay.
// Returns 0 where the engine refuses the request, else 1. clocks: see Engine.
extern "C" int fastcar_rtl_engine(const void* x, const void* weights, uint32_t mask, uint32_t op, int32_t inputs, int32_t channels,
                                  int32_t tile, int32_t tiles, const Memory* memory, void* y_rtl, void* y_cpp, int64_t* clocks) {
    const Call call = decode<C>(mask, op, inputs, channels, tile, tiles);
    if (call.products == 0) return 0;
    core_t core_of[INDEX_REGISTER_BITS];
    pass_t pass_of[INDEX_REGISTER_BITS];
    const int passes = place_rows<PLACE_BITS>(call.computing, C::BATCH, C::CORES, core_of, pass_of);
    const word_t* rows = static_cast<const word_t*>(x);
    const Product &p = call.last, &f = call.first;
    const int section = (call.words + 255) / 256 * 256, whole = p.tile * C::PORTS / FLOAT_LANES;
    std::vector<const beat_t*> sections;
    for (int a = 0; a < AXI; ++a) sections.push_back(static_cast<const beat_t*>(weights) + static_cast<size_t>(a) * section);

    Stream in, out, words[C::PORTS];
    hls::stream<beat_t> beats[AXI];
    read_rows<C>(rows, call.computing, call.row_words, in);
    for (int a = 0; a < AXI; ++a) read_weights<C>(sections[a], 0, call.words, beats[a]);
    share_weights<C>(beats, call.words, words);
    const float gain[INDEX_REGISTER_BITS] = {};
    compute<C>(in, words, core_of, pass_of, call.computing, call.last_rows, passes, passes, call.products, f.channels, f.tile,
               f.tiles, f.scale_words, f.head_words, f.activated, f.bias, p.inputs, p.channels, p.tile, p.tiles, p.sums,
               p.channel_words, p.scale_words, p.head_words, p.bias, gain, out);
    write_rows<C>(call.computing, p.tiles, whole, call.result_words, out, static_cast<word_t*>(y_cpp));

    Engine engine(*memory);
    // The call's weights are not the first ones of their sections.
    const int first = 256;
    std::vector<const void*> bases;
    for (const beat_t* own : sections) bases.push_back(own - first);
    engine.start(bases);
    send_call<C>(call, passes, first, in);
    read_rows<C>(rows, call.computing, call.row_words, in);
    engine.serve(in, out);
    write_rows<C>(call.computing, p.tiles, whole, call.result_words, out, static_cast<word_t*>(y_rtl));
    in.write(word_t(0));
    engine.serve(in, out);
    *clocks = engine.clocks;
    return 1;
}

#endif
