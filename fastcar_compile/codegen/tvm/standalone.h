// What a library without TVM's runtime needs of it: TVM's C ABI as far as kernels use it, in one thread.
#ifndef FASTCAR_STANDALONE_H
#define FASTCAR_STANDALONE_H

#include <stddef.h>
#include <stdint.h>

#include <tvm/ffi/c_api.h>

#define LINE 64  // bytes that a buffer's address is a multiple of, as TVM asks
#define PAGE 65536

#define SHAPE(name, ...) static int64_t name[] = {__VA_ARGS__};
#define STORAGE(name, bytes) static _Alignas(LINE) uint8_t name[(bytes) > 0 ? (bytes) : 1];
#define CONSTANT(name, ...) static const _Alignas(LINE) uint8_t name[] = {__VA_ARGS__};
#define TENSOR(name, memory, dimensions, code, bits, shape) \
    static DLTensor name = {memory, {kDLCPU, 0}, dimensions, {code, bits, 1}, shape, 0, 0};
#define KERNEL(name) int32_t __tvm_ffi_##name(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);
#define ARGUMENT(tensor) {.type_index = kTVMFFIDLTensorPtr, .v_ptr = &tensor}
#define CALL(name, ...)                                                                                     \
    do {                                                                                                    \
        const TVMFFIAny given[] = {__VA_ARGS__};                                                            \
        TVMFFIAny result = {.type_index = kTVMFFINone};                                                     \
        const int32_t code = __tvm_ffi_##name(0, given, (int32_t)(sizeof given / sizeof *given), &result); \
        if (code != 0) {                                                                                    \
            return code;                                                                                    \
        }                                                                                                   \
    } while (0)

extern uint8_t __heap_base;
static uintptr_t heap_end;

// Memory that is never given back, zero at first; 0: there is none.
void *fastcar_allocate(uint32_t bytes) {
    const uintptr_t start = ((heap_end != 0 ? heap_end : (uintptr_t)&__heap_base) + LINE - 1) / LINE * LINE;
    const uintptr_t end = start + bytes, there = __builtin_wasm_memory_size(0) * PAGE;
    if (end < start || (end > there && __builtin_wasm_memory_grow(0, (end - there + PAGE - 1) / PAGE) == (size_t)-1)) {
        return 0;
    }
    heap_end = end;
    return (void *)start;
}

// A kernel's buffers. A few sizes come again in every step, so a block that is free is used again.
enum { BLOCKS = 256 };
static struct {
    uint8_t *start;
    uint64_t bytes;
    int used;
} blocks[BLOCKS];

static void *take_block(int device_type, int device_id, uint64_t bytes, int code, int bits) {
    (void)device_type, (void)device_id, (void)code, (void)bits;
    int best = -1, i = 0;
    for (; i < BLOCKS && blocks[i].start != 0; ++i) {
        if (!blocks[i].used && blocks[i].bytes >= bytes && (best < 0 || blocks[i].bytes < blocks[best].bytes)) {
            best = i;
        }
    }
    if (best < 0) {
        best = i;
        if (i == BLOCKS || bytes > UINT32_MAX || (blocks[i].start = fastcar_allocate((uint32_t)bytes)) == 0) {
            return 0;
        }
        blocks[i].bytes = bytes;
    }
    blocks[best].used = 1;
    return blocks[best].start;
}

static int give_block(int device_type, int device_id, void *block) {
    (void)device_type, (void)device_id;
    for (int i = 0; i < BLOCKS; ++i) {
        if (blocks[i].start == block) {
            blocks[i].used = 0;
            return 0;
        }
    }
    return -1;
}

typedef struct {
    void *sync_handle;
    int32_t num_task;
} Environment;

static int run_alone(int (*task)(int, Environment *, void *), void *data, int tasks) {
    (void)tasks;
    Environment alone = {0, 1};
    return task(0, &alone, data);
}

static int barrier_alone(int task, Environment *environment) {
    (void)task, (void)environment;
    return 0;
}

// Kernels call TVM's runtime through these variables, which its loader would set.
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = take_block;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = give_block;
int (*__TVMBackendParallelLaunch)(int (*)(int, Environment *, void *), void *, int) = run_alone;
int (*__TVMBackendParallelBarrier)(int, Environment *) = barrier_alone;

static int32_t first_difference(const uint32_t *wanted, const uint32_t *given, int32_t count) {
    for (int32_t i = 0; i < count; ++i) {
        if (wanted[i] != given[i]) {
            return i;
        }
    }
    return -1;
}

#endif
