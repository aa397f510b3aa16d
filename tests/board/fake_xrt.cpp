// The symbols of libxrt_coreutil that the host program uses, against XRT's own headers, with the artifact's kernels in C
// simulation behind them: what a board does, without the board. FAKE_XRT picks a fault. FAKE_XRT_LOG is a file that gets
// a line per run: the kernel, then its 32-bit scalars as name=value, then the first row of its input and which rows are there.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_kernel.h>
#include <experimental/xrt_xclbin.h>

#include "fastcar_step.cpp"
#if __has_include("fastcar_engine.cpp")
#include "fastcar_engine.cpp"  // a kernel of its own
#define ENGINE_KERNEL {"fastcar_engine", invoke(&fastcar_engine)},
#else
#define ENGINE_KERNEL
#endif
#include "fastcar_probe.cpp"
#include "fake_names.hpp"  // ARGUMENT_NAMES, from the artifact's manifest and the probe's interface

namespace {

bool fault(const std::string& name) {
    const char* chosen = std::getenv("FAKE_XRT");
    return chosen != nullptr && name == chosen;
}

struct Value {
    void* memory = nullptr;
    std::vector<char> scalar;

    template <class T>
    T as() const {
        typedef std::remove_cv_t<std::remove_pointer_t<T>> Plain;
        if constexpr (std::is_pointer_v<T>) {
            return static_cast<Plain*>(memory);
        } else {
            Plain value;
            if (scalar.size() != sizeof(value)) {
                throw std::runtime_error("fake xrt: a scalar of another size");
            }
            std::memcpy(&value, scalar.data(), sizeof(value));
            return value;
        }
    }
};

typedef std::function<void(const std::vector<Value>&)> Invoke;

template <class... A, size_t... I>
Invoke invoke(void (*kernel)(A...), std::index_sequence<I...>) {
    return [kernel](const std::vector<Value>& values) { kernel(values.at(I).template as<A>()...); };
}

template <class... A>
Invoke invoke(void (*kernel)(A...)) {
    return invoke(kernel, std::index_sequence_for<A...>());
}

const std::map<std::string, Invoke> KERNELS = {ENGINE_KERNEL {"fastcar_step", invoke(&fastcar_step)}, {"fastcar_probe", invoke(&fastcar_probe)}};

void log_run(const std::string& kernel, const std::vector<Value>& values) {
    const char* path = std::getenv("FAKE_XRT_LOG");
    if (path == nullptr) {
        return;
    }
    std::ofstream file(path, std::ios::app);
    file << kernel;
    const std::vector<std::string>& names = ARGUMENT_NAMES.at(kernel);
    const auto memory = [&](const char* name) {
        return values[static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin())].as<const uint32_t*>();
    };
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i].scalar.size() == sizeof(uint32_t)) {
            file << ' ' << names[i] << '=' << values[i].as<uint32_t>();
        }
    }
    if (kernel == "fastcar_step") {
        const uint32_t *list = memory("inputs"), rows = memory("step_program")[5];
        uint32_t active = 0;
        for (uint32_t row = 0; row < rows; ++row) active |= (list[4 * row + 2] >> 16 & 1u) << row;
        file << " position=" << list[0] << " step=" << list[1] << " active=" << active;
    }
    file << '\n';
}

xrt::uuid the_uuid(const char* last) {
    return xrt::uuid(std::string("00000000-0000-0000-0000-00000000000") + last);
}

}  // namespace

namespace xrt_core {
class device {};
}  // namespace xrt_core

namespace xrt {

class bo_impl {
public:
    explicit bo_impl(size_t bytes, int group) : memory(bytes), device(bytes, char(0x55)), group(group) {}
    std::vector<char> memory;  // the host's side
    std::vector<char> device;
    int group;
};

class kernel_impl {
public:
    std::string name;
    int group(int argument) const { return argument + 100 * static_cast<int>(name.size()); }
};

class run_impl {
public:
    std::shared_ptr<kernel_impl> kernel;
    std::map<int, std::vector<char>> scalars;
    std::map<int, std::shared_ptr<bo_impl>> buffers;
};

class xclbin_impl {};
class xclbin::kernel_impl {
public:
    std::string name;
};
class xclbin::arg_impl {
public:
    std::string name;
};

device::device(unsigned int index) : handle(std::make_shared<xrt_core::device>()) {
    if (index != 0) {
        throw std::runtime_error("No such device with index '" + std::to_string(index) + "'");
    }
}
device::operator xclDeviceHandle() const { return handle.get(); }
uuid device::load_xclbin(const xclbin&) { return the_uuid("1"); }
uuid device::get_xclbin_uuid() const { return the_uuid(fault("other program") ? "2" : "1"); }

xclbin::xclbin(const std::string& path) : detail::pimpl<xclbin_impl>(std::make_shared<xclbin_impl>()) {
    if (!std::ifstream(path)) {
        throw std::runtime_error("Failed to open file '" + path + "' for reading");
    }
}
uuid xclbin::get_uuid() const { return the_uuid("1"); }
xclbin::kernel xclbin::get_kernel(const std::string& name) const {
    if (KERNELS.count(name) == 0 || fault("no kernel")) {
        return kernel();
    }
    auto impl = std::make_shared<kernel_impl>();
    impl->name = name;
    return kernel(impl);
}
std::vector<xclbin::arg> xclbin::kernel::get_args() const {
    std::vector<arg> arguments;
    for (const std::string& name : ARGUMENT_NAMES.at(handle->name)) {
        auto impl = std::make_shared<arg_impl>();
        impl->name = name;
        arguments.push_back(arg(impl));
    }
    if (fault("other design")) {
        arguments.pop_back();
    }
    return arguments;
}
std::string xclbin::arg::get_name() const { return handle->name; }

kernel::kernel(const xrt::device&, const xrt::uuid&, const std::string& name, cu_access_mode)
    : handle(std::make_shared<kernel_impl>()) {
    handle->name = name;
}
int kernel::group_id(int argument) const { return handle->group(argument); }

bo::bo(xclDeviceHandle, size_t bytes, bo::flags, memory_group group)
    : handle(std::make_shared<bo_impl>(bytes, static_cast<int>(group))) {
    if (fault("no memory")) {
        throw std::bad_alloc();
    }
}
void* bo::map() { return handle->memory.data(); }
size_t bo::size() const { return handle->memory.size(); }
void bo::write(const void* data, size_t bytes, size_t first) {
    std::memcpy(&handle->memory.at(first), data, bytes);
}
void bo::read(void* data, size_t bytes, size_t first) {
    std::memcpy(data, &handle->memory.at(first), bytes);
}
void bo::sync(xclBOSyncDirection direction, size_t bytes, size_t first) {
    std::vector<char>& from = direction == XCL_BO_SYNC_BO_TO_DEVICE ? handle->memory : handle->device;
    std::vector<char>& to = direction == XCL_BO_SYNC_BO_TO_DEVICE ? handle->device : handle->memory;
    std::memcpy(&to.at(first), &from.at(first), bytes);
}

run::run(const xrt::kernel& kernel) : handle(std::make_shared<run_impl>()) { handle->kernel = kernel.get_handle(); }
void run::set_arg_at_index(int index, const void* value, size_t bytes) {
    const char* first = static_cast<const char*>(value);
    handle->scalars[index].assign(first, first + bytes);
}
void run::set_arg_at_index(int index, const bo& buffer) {
    if (buffer.get_handle()->group != handle->kernel->group(index)) {
        throw std::runtime_error("fake xrt: the buffer is in another memory than the argument");
    }
    handle->buffers[index] = buffer.get_handle();
}
void run::start() {
    std::vector<Value> values(ARGUMENT_NAMES.at(handle->kernel->name).size());
    for (const auto& entry : handle->scalars) {
        values.at(static_cast<size_t>(entry.first)).scalar = entry.second;
    }
    for (const auto& entry : handle->buffers) {
        values.at(static_cast<size_t>(entry.first)).memory = entry.second->device.data();
    }
    log_run(handle->kernel->name, values);
    static bool flipped = false;
    if (fault("flipped bit") && !flipped) {
        static_cast<char*>(values.front().memory)[0] ^= 1;
        flipped = true;
    }
    if (!fault("hang")) {
        KERNELS.at(handle->kernel->name)(values);
    }
}
ert_cmd_state run::wait(const std::chrono::milliseconds&) const {
    return fault("hang") ? ERT_CMD_STATE_TIMEOUT : ERT_CMD_STATE_COMPLETED;
}

}  // namespace xrt
