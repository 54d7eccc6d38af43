// The emulated device: blocks one after the other, the threads of a block as fibers, warps in a shuffled order.
#include <cstdarg>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "race.h"
#include "simt.h"
#include "simt_ptx.h"

namespace simt {
namespace {

struct Copy {
    unsigned char* shared;
    const void* global;
    int bytes;
    bool valid;
};

enum class State { kReady, kInCollective, kAtBarrier, kDone };

struct Thread {
    Indices indices;
    Context context;
    State state = State::kReady;
    race::Actor actor{};
    // Of the collective operation it waits in.
    const char* name = nullptr;
    int line = 0;
    unsigned mask = 0;
    void* operand = nullptr;
    void (*operation)(Operands) = nullptr;
    // Copies not yet waited for, in order; the last group is the open one.
    std::vector<std::vector<Copy>> copies{1};
};

struct Failure {};

// The dynamic shared memory of one block. Under AddressSanitizer its redzones are the guards; else known bytes are.
class SharedMemory {
public:
    explicit SharedMemory(size_t bytes) : bytes_(bytes) {
        void* memory = nullptr;
        if (posix_memalign(&memory, kAlignment, bytes + 2 * kGuard) != 0) throw std::bad_alloc();
        memory_.reset(static_cast<unsigned char*>(memory));
        std::memset(memory_.get(), kGuardByte, bytes + 2 * kGuard);
        std::memset(data(), 0xff, bytes);
    }
    unsigned char* data() const { return memory_.get() + kGuard; }
    size_t bytes() const { return bytes_; }
    bool contains(const void* address, size_t bytes) const {
        const auto at = static_cast<const unsigned char*>(address);
        return at >= data() && at + bytes <= data() + bytes_;
    }
    bool guards_intact() const {
        const auto intact = [](const unsigned char* guard) {
            return std::all_of(guard, guard + kGuard, [](unsigned char byte) { return byte == kGuardByte; });
        };
        return intact(memory_.get()) && intact(data() + bytes_);
    }

private:
    struct Free {
        void operator()(unsigned char* memory) const { free(memory); }
    };
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t kGuard = 0;
#else
    static constexpr size_t kGuard = race::kGuard;
#endif
    static constexpr size_t kAlignment = 1024;
    static constexpr unsigned char kGuardByte = 0xa5;
    std::unique_ptr<unsigned char, Free> memory_;
    size_t bytes_;
};

struct Machine {
    std::mt19937 random{0};
    int num_sms = 4;
    bool dry_run = false;  // count launches and copies, and do nothing
    int num_launches = 0;
    std::string error;
    std::map<const void*, size_t> shared_limits;  // what cudaFuncSetAttribute allowed

    const std::function<void()>* kernel = nullptr;
    std::unique_ptr<SharedMemory> shared;
    std::vector<Stack> stacks;
    std::vector<Thread> threads;
    Thread* current = nullptr;  // null while the scheduler runs
    Context scheduler;
    bool failed = false;

    void run_block(const Indices& first, uint32_t block_number, size_t shared_bytes);
    void resume(Thread& thread);
    void run_warp(int warp);
    bool complete_collective(int warp);
    void yield() { switch_to(current->context, scheduler); }
};

Machine machine;

const Thread& running() {
    if (machine.current == nullptr) abort();  // device code outside a launch
    return *machine.current;
}

void enter_fiber() {
    arrived(machine.current->context, &machine.scheduler);
    (*machine.kernel)();
    Thread& self = *machine.current;
    for (const std::vector<Copy>& group : self.copies) {
        if (!group.empty()) fail("the thread ends with copies that it never waited for");
    }
    self.state = State::kDone;
    switch_to(self.context, machine.scheduler, true);
}

void Machine::resume(Thread& thread) {
    current = &thread;
    race::set_actor(&thread.actor);
    switch_to(scheduler, thread.context);
    race::set_actor(nullptr);
    current = nullptr;
    if (failed) throw Failure{};
}

// Runs one operation that all lanes of its mask have reached. False if none waits; fails if one can never be complete.
bool Machine::complete_collective(int warp) {
    const int base = warp * kWarp;
    const int lanes = std::min<int>(kWarp, static_cast<int>(threads.size()) - base);
    const Thread* stuck = nullptr;
    for (int leader = 0; leader < lanes; ++leader) {
        const Thread& first = threads[base + leader];
        if (first.state != State::kInCollective) continue;
        void* operands[kWarp] = {};
        bool complete = true;
        for (int lane = 0; lane < kWarp; ++lane) {
            if ((first.mask >> lane & 1) == 0) continue;
            const bool same = lane < lanes && threads[base + lane].state == State::kInCollective &&
                              threads[base + lane].name == first.name && threads[base + lane].line == first.line &&
                              threads[base + lane].mask == first.mask;
            complete = complete && same;
            if (same) operands[lane] = threads[base + lane].operand;
        }
        if (!complete) {
            stuck = &first;
            continue;
        }
        if ((first.mask >> leader & 1) == 0) fail("%s at line %d: the lane is not in its own mask", first.name, first.line);
        if (first.operation != nullptr) first.operation(operands);
        for (int lane = 0; lane < lanes; ++lane) {
            if (first.mask >> lane & 1) threads[base + lane].state = State::kReady;
        }
        return true;
    }
    if (stuck == nullptr) return false;
    fail("divergent warp %d: not all lanes of mask %08x reach %s at line %d", warp, stuck->mask, stuck->name, stuck->line);
}

void Machine::run_warp(int warp) {
    const int begin = warp * kWarp, end = std::min<int>(begin + kWarp, static_cast<int>(threads.size()));
    do {
        if (random() & 1) {
            for (int i = begin; i < end; ++i) {
                if (threads[i].state == State::kReady) resume(threads[i]);
            }
        } else {
            for (int i = end - 1; i >= begin; --i) {
                if (threads[i].state == State::kReady) resume(threads[i]);
            }
        }
    } while (complete_collective(warp));
}

void Machine::run_block(const Indices& first, uint32_t block_number, size_t shared_bytes) {
    const unsigned count = first.block_size.x * first.block_size.y * first.block_size.z;
    shared = std::make_unique<SharedMemory>(shared_bytes);
    race::start_block(shared->data(), shared_bytes);
    while (stacks.size() < count) stacks.emplace_back();
    threads.assign(count, Thread{});
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        thread.indices = first;
        const unsigned x = first.block_size.x, y = first.block_size.y;
        thread.indices.thread = make_uint3(i % x, i / x % y, i / (x * y));
        thread.actor = {block_number, i, 0, 0};
        prepare(thread.context, stacks[i], enter_fiber);
    }
    std::vector<int> warps((count + kWarp - 1) / kWarp);
    std::iota(warps.begin(), warps.end(), 0);
    for (;;) {
        std::shuffle(warps.begin(), warps.end(), random);
        for (int warp : warps) run_warp(warp);
        bool waiting = false;
        for (Thread& thread : threads) {
            if (thread.state != State::kAtBarrier) continue;
            waiting = true;
            thread.state = State::kReady;
            ++thread.actor.block_phase;
        }
        if (!waiting) break;
    }
    if (!shared->guards_intact()) fail("a write outside the %zu bytes of shared memory", shared_bytes);
}

cudaError_t run_grid(dim3 grid, dim3 block, size_t shared_bytes) {
    const uint64_t count = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    std::vector<uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), machine.random);
    race::start_launch();
    try {
        for (uint32_t number : order) {
            const uint3 index = make_uint3(number % grid.x, number / grid.x % grid.y, number / (grid.x * grid.y));
            machine.run_block({make_uint3(0, 0, 0), index, block, grid}, number, shared_bytes);
        }
    } catch (const Failure&) {
        return cudaErrorLaunchFailure;
    }
    return cudaSuccess;
}

}  // namespace

const Indices& indices() { return running().indices; }

unsigned char* shared_memory() { return machine.shared->data(); }

void fail(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    machine.error = text;
    machine.failed = true;
    if (machine.current == nullptr) throw Failure{};
    const Indices& at = machine.current->indices;
    snprintf(text, sizeof text, " (block %u,%u,%u thread %u,%u,%u)", at.block.x, at.block.y, at.block.z, at.thread.x,
             at.thread.y, at.thread.z);
    machine.error += text;
    machine.yield();
    abort();  // nobody resumes a failed launch
}

Work work;

cudaError_t launch(const void* function, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
                   const std::function<void()>& kernel) {
    constexpr size_t kDefaultShared = 48 * 1024, kMostShared = 227 * 1024;
    const unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > 1024 || grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 ||
        grid.z == 0 || grid.z > 65535) {
        return cudaErrorInvalidConfiguration;
    }
    const auto limit = machine.shared_limits.find(function);
    const size_t allowed = limit == machine.shared_limits.end() ? kDefaultShared : std::max(kDefaultShared, limit->second);
    if (shared_bytes > std::min(allowed, kMostShared)) return cudaErrorInvalidValue;
    ++machine.num_launches;
    work.shared = std::max(work.shared, static_cast<int64_t>(shared_bytes));
    if (machine.dry_run) return cudaSuccess;
    machine.kernel = &kernel;
    machine.failed = false;
    machine.error.clear();
    return run_grid(grid, block, shared_bytes);
}

void block_barrier() {
    machine.current->state = State::kAtBarrier;
    machine.yield();
}

void warp_collective(const char* name, int line, unsigned mask, void* operand, void (*operation)(Operands)) {
    Thread& self = *machine.current;
    self.name = name;
    self.line = line;
    self.mask = mask;
    self.operand = operand;
    self.operation = operation;
    self.state = State::kInCollective;
    machine.yield();
}

void warp_barrier(int line, unsigned mask) {
    char nothing = 0;
    warp_collective("__syncwarp", line, mask, &nothing, nullptr);
    if (mask == 0xffffffffu) ++machine.current->actor.warp_phase;
}

bool in_shared_memory(const void* address, size_t bytes) { return machine.shared->contains(address, bytes); }

void copy_async(void* target, const void* global, int bytes, bool valid) {
    if (!in_shared_memory(target, bytes)) fail("cp.async writes outside shared memory");
    if (reinterpret_cast<uintptr_t>(target) % bytes != 0 || reinterpret_cast<uintptr_t>(global) % bytes != 0) {
        fail("cp.async with an address that is not aligned to %d bytes", bytes);
    }
    race::access(target, bytes, true);
    std::memset(target, 0xff, bytes);
    machine.current->copies.back().push_back({static_cast<unsigned char*>(target), global, bytes, valid});
}

void copy_commit() { machine.current->copies.emplace_back(); }

void copy_wait(int pending) {
    std::vector<std::vector<Copy>>& copies = machine.current->copies;
    while (static_cast<int>(copies.size()) - 1 > pending) {
        for (const Copy& copy : copies.front()) {
            race::access(copy.shared, copy.bytes, true);
            if (copy.valid) {
                race::access(copy.global, copy.bytes, false);
                work.copied += copy.bytes;
                std::memcpy(copy.shared, copy.global, copy.bytes);
            } else {
                std::memset(copy.shared, 0, copy.bytes);
            }
        }
        copies.erase(copies.begin());
    }
}

}  // namespace simt

// The part of the CUDA runtime that the launchers call.
extern "C" {

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
    *value = simt::machine.num_sms;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0) return cudaErrorInvalidValue;
    simt::machine.shared_limits[function] = static_cast<size_t>(value);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    if (bytes != 0 && (to == nullptr || from == nullptr)) return cudaErrorInvalidValue;
    if (bytes != 0 && !simt::machine.dry_run) std::memcpy(to, from, bytes);
    return cudaSuccess;
}

// For the tests.
#pragma GCC visibility push(default)

void simt_configure(unsigned seed, int num_sms) {
    simt::machine.random.seed(seed);
    simt::machine.num_sms = num_sms;
}

// From now on launches only count; returns how many there have been since the last call.
int simt_dry_run(int on) {
    simt::machine.dry_run = on != 0;
    return std::exchange(simt::machine.num_launches, 0);
}

void simt_work(int64_t* copied, int64_t* products, int64_t* shared) {
    const simt::Work done = std::exchange(simt::work, {});
    *copied = done.copied;
    *products = done.products;
    *shared = done.shared;
}

const char* simt_error() { return simt::machine.error.c_str(); }

void simt_watch(const void* memory, size_t bytes) { simt::race::watch(memory, bytes); }

void simt_unwatch_all() { simt::race::unwatch_all(); }

#pragma GCC visibility pop
}
