// A device, and a kernel on it whose arguments are filled by name. Needs XRT (https://xilinx.github.io/XRT).
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_kernel.h>
#if __has_include(<xrt/experimental/xrt_xclbin.h>)
#include <xrt/experimental/xrt_xclbin.h>
#else
#include <experimental/xrt_xclbin.h>
#endif

#include "fastcar_error.hpp"
#include "fastcar_kernels.hpp"

namespace fastcar_host {

// ---- contiguous memory (CMA): what XRT allocates buffers from on a board whose memory is also Linux's

static const char* const MEMINFO = "/proc/meminfo";
static const char* const NO_MEMINFO = "none";  // as a path: nothing is checked

// A field of a file such as /proc/meminfo, bytes; 0: it has no such field. Throws Error: the file cannot be read.
inline uint64_t meminfo_bytes(const std::string& path, const std::string& field) {
    std::ifstream file(path);
    if (!file) {
        throw Error("the memory of the board cannot be read", path, "give --meminfo none where there is no such file");
    }
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string name;
        uint64_t kilobytes = 0;
        if (words >> name >> kilobytes && name == field + ":") return 1024 * kilobytes;
    }
    return 0;
}

inline std::string megabytes(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f MB", static_cast<double>(bytes) / 1e6);
    return text;
}

// Buffers of `bytes` bytes are going to be made. Throws Error: less contiguous memory is free.
inline void require_contiguous(uint64_t bytes, const std::string& meminfo) {
    if (meminfo == NO_MEMINFO) return;
    const uint64_t free = meminfo_bytes(meminfo, "CmaFree"), total = meminfo_bytes(meminfo, "CmaTotal");
    if (bytes > free) {
        throw Error("the buffers need " + megabytes(bytes) + " of contiguous memory (CMA), of which " + megabytes(free) +
                        " are free and " + megabytes(total) + " reserved",
                    meminfo,
                    "end other programs that use the board, or reserve more when Linux starts: docs/tutorial/board.md, "
                    "\"Memory under Linux\"; --meminfo none skips this check");
    }
}

// ---- the device

// An open device with an xclbin in it that is known to hold the kernels of this design.
class Device {
public:
    // Throws Error: no such device, the xclbin cannot be read or loaded, or it is of another design.
    Device(unsigned index, const std::string& xclbin, const std::vector<KernelSpec>& kernels) : where_(xclbin) {
        const std::string name = "device " + std::to_string(index);
        const xrt::xclbin image = attempt("the xclbin cannot be read", xclbin, "give the file that `make link` wrote",
                                          [&] { return xrt::xclbin(xclbin); });
        for (const KernelSpec& kernel : kernels) check(image, kernel);
        device_ = attempt("the device cannot be opened", name, "load the XRT driver; `xbutil examine` lists the devices",
                          [&] { return xrt::device(index); });
        uuid_ = attempt("the xclbin cannot be loaded", xclbin + " on " + name, "build it for this board's platform",
                        [&] { return device_.load_xclbin(image); });
        const xrt::uuid loaded = device_.get_xclbin_uuid();
        if (uuid_ != image.get_uuid() || loaded != image.get_uuid()) {
            throw Error("the device holds the xclbin " + loaded.to_string() + ", not " + image.get_uuid().to_string(),
                        name, "another program has loaded its own: end it");
        }
    }

    const xrt::device& device() const { return device_; }
    const xrt::uuid& uuid() const { return uuid_; }

    // What `work` returns; whatever it throws becomes an Error.
    template <class Work>
    static auto attempt(const std::string& what, const std::string& where, const std::string& hint, Work work)
        -> decltype(work()) {
        try {
            return work();
        } catch (const std::exception& error) {
            throw Error(what + ": " + error.what(), where, hint);
        }
    }

private:
    void check(const xrt::xclbin& image, const KernelSpec& kernel) const {
        const std::string hint = "link the kernels of this artifact again";
        const xrt::xclbin::kernel found = image.get_kernel(kernel.name);
        if (!found) throw Error("the xclbin has no kernel " + kernel.name, where_, hint);
        std::string names, expected;
        for (const xrt::xclbin::arg& argument : found.get_args()) names += " " + argument.get_name();
        for (const ArgumentSpec& argument : kernel.arguments) expected += " " + argument.name;
        for (const std::string& stream : kernel.streams) expected += " " + stream;
        if (names != expected) {
            throw Error("the xclbin is of another design: " + kernel.name + " takes" + names + "; expected are" + expected,
                        where_, hint);
        }
    }

    std::string where_;
    xrt::device device_;
    xrt::uuid uuid_;
};

// A kernel keeps tables and weights from run to run, so one program has it for itself.
static const xrt::kernel::cu_access_mode ACCESS = xrt::kernel::cu_access_mode::exclusive;

// The own buffer of an argument, in the host's memory too.
class Mapped {
public:
    Mapped() = default;
    Mapped(const xrt::bo& buffer, uint64_t bytes) : buffer_(buffer), data_(buffer_.map<char*>()), bytes_(bytes) {}

    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }

    uint64_t bytes() const { return bytes_; }

    // The first bytes become the device's, or those of the host.
    void to_device(uint64_t bytes) { buffer_.sync(XCL_BO_SYNC_BO_TO_DEVICE, bytes, 0); }
    void from_device(uint64_t bytes) { buffer_.sync(XCL_BO_SYNC_BO_FROM_DEVICE, bytes, 0); }

    // All bytes become 0.
    void clear() {
        std::memset(data_, 0, bytes_);
        to_device(bytes_);
    }

private:
    xrt::bo buffer_;
    char* data_ = nullptr;
    uint64_t bytes_ = 0;
};

// A compute unit, and with one at the other end of its streams both, which run together and have different arguments. Every argument
// has to be filled before the first run; it keeps its value after a run.
class ComputeUnit {
public:
    ComputeUnit(const Device& device, const std::vector<KernelSpec>& kernels) : device_(device) {
        for (const KernelSpec& kernel : kernels) {
            kernels_.push_back(Device::attempt("the kernel cannot be opened", kernel.name, "end other programs that use the board",
                                               [&] { return xrt::kernel(device.device(), device.uuid(), kernel.name, ACCESS); }));
            runs_.emplace_back(kernels_.back());
            for (size_t i = 0; i < kernel.arguments.size(); ++i) {
                places_.push_back({kernels_.size() - 1, static_cast<int>(i)});
            }
            spec_.name = spec_.name.empty() ? kernel.name : spec_.name;
            spec_.arguments.insert(spec_.arguments.end(), kernel.arguments.begin(), kernel.arguments.end());
        }
        filled_.resize(spec_.arguments.size(), false);
    }

    // A buffer of `bytes` bytes for an argument, in the memory that it is connected to.
    xrt::bo make_buffer(const std::string& argument, uint64_t bytes) {
        const size_t i = index(argument);
        if (spec_.arguments[i].kind == Kind::SCALAR) throw Error(argument + " is a scalar", spec_.name, "");
        const Place at = places_[i];
        return Device::attempt("no memory for " + std::to_string(bytes) + " bytes", place(argument),
                               "a region of contiguous memory has to hold it (docs/tutorial/board.md); or compile for fewer bits",
                               [&] { return xrt::bo(device_.device(), bytes, kernels_[at.kernel].group_id(at.argument)); });
    }

    // The argument reads from or writes to this buffer from now on.
    void bind(const std::string& argument, const xrt::bo& buffer) {
        const size_t i = index(argument);
        runs_[places_[i].kernel].set_arg(places_[i].argument, buffer);
        filled_[i] = true;
    }

    // Copies into the argument's own buffer and to the device. Throws Error: more bytes than the argument has.
    void write(const std::string& argument, const void* data, uint64_t bytes) {
        xrt::bo& buffer = own(argument, bytes);
        buffer.write(data, bytes, 0);
        buffer.sync(XCL_BO_SYNC_BO_TO_DEVICE, bytes, 0);
    }

    // The argument is given its own buffer if it has none yet, whatever is in it: the kernel will not read it.
    void fill(const std::string& argument) { own(argument, 0); }

    // The argument's own buffer, which it is given if it has none yet.
    Mapped map(const std::string& argument) { return Mapped(own(argument, 0), bytes_of(argument)); }

    // Where a scalar is in the signature.
    template <class T>
    size_t scalar(const std::string& argument) const {
        const size_t i = index(argument);
        if (spec_.arguments[i].kind != Kind::SCALAR || spec_.arguments[i].bytes != sizeof(T)) {
            throw Error(argument + " is no scalar of " + std::to_string(sizeof(T)) + " bytes", spec_.name, "");
        }
        return i;
    }

    // `place`: what `scalar` returned for this type.
    template <class T>
    void set(size_t place, T value) {
        runs_[places_[place].kernel].set_arg(places_[place].argument, value);
        filled_[place] = true;
    }

    template <class T>
    void set(const std::string& argument, T value) {
        set(scalar<T>(argument), value);
    }

    // One execution, waited for. Throws Error: an argument was never filled, or the kernel did not complete.
    void run() {
        if (!all_filled_) fill_outputs();
        for (size_t i = runs_.size(); i-- > 0;) runs_[i].start();
        for (const xrt::run& run : runs_) {
            const ert_cmd_state state = run.wait(std::chrono::milliseconds(TIMEOUT_MS));
            if (state != ERT_CMD_STATE_COMPLETED) {
                throw Error("the kernel did not complete, XRT state " + std::to_string(state), spec_.name,
                            "see `dmesg` and `xbutil examine`; load the xclbin again");
            }
        }
    }

    uint64_t bytes_of(const std::string& argument) const { return spec_.arguments[index(argument)].bytes; }

    // Arguments that take one section of a weight stream each, in the order of the sections.
    std::vector<std::string> weights() const { return beginning("weights_"); }

    // Arguments whose names begin with this, in their order.
    std::vector<std::string> beginning(const std::string& prefix) const {
        std::vector<std::string> names;
        for (const ArgumentSpec& argument : spec_.arguments) {
            if (argument.name.rfind(prefix, 0) == 0) names.push_back(argument.name);
        }
        return names;
    }

private:
    static constexpr int TIMEOUT_MS = 10000;

    void fill_outputs() {
        for (size_t i = 0; i < filled_.size(); ++i) {
            if (spec_.arguments[i].kind == Kind::OUTPUT) fill(spec_.arguments[i].name);
            if (!filled_[i]) throw Error("argument " + spec_.arguments[i].name + " was never filled", spec_.name, "");
        }
        all_filled_ = true;
    }

    std::string place(const std::string& argument) const { return spec_.name + ", argument " + argument; }

    size_t index(const std::string& argument) const {
        for (size_t i = 0; i < spec_.arguments.size(); ++i) {
            if (spec_.arguments[i].name == argument) return i;
        }
        throw Error("there is no argument " + argument, spec_.name, "");
    }

    xrt::bo& own(const std::string& argument, uint64_t bytes) {
        if (bytes > bytes_of(argument)) {
            throw Error(std::to_string(bytes) + " bytes for a buffer of " + std::to_string(bytes_of(argument)),
                        place(argument), "use the files of one artifact together");
        }
        const auto found = buffers_.find(argument);
        if (found != buffers_.end()) return found->second;
        xrt::bo& made = buffers_.emplace(argument, make_buffer(argument, bytes_of(argument))).first->second;
        bind(argument, made);
        return made;
    }

    const Device& device_;
    struct Place {
        size_t kernel;
        int argument;
    };
    KernelSpec spec_;  // the first kernel, with the arguments of all
    std::vector<xrt::kernel> kernels_;
    std::vector<xrt::run> runs_;
    std::vector<Place> places_;  // of the arguments
    std::vector<bool> filled_;
    bool all_filled_ = false;
    std::map<std::string, xrt::bo> buffers_;
};

}  // namespace fastcar_host
