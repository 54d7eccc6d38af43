#include "race.h"

#include <memory>
#include <vector>

#include "simt.h"

namespace simt::race {
namespace {

constexpr size_t kGrain = 2;  // bytes with a history of their own: the smallest element the kernels share

// What was done to a grain: the last write, and the reads since that no later read comes after.
struct History {
    bool written = false;
    Actor writer{};
    std::vector<Actor> readers;
};

struct Range {
    uintptr_t begin;
    std::vector<History> grains;
    const char* name;

    Range(const void* memory, size_t bytes, const char* kind)
        : begin(reinterpret_cast<uintptr_t>(memory)), grains((bytes + kGrain - 1) / kGrain), name(kind) {}
    uintptr_t end() const { return begin + grains.size() * kGrain; }
};

std::unique_ptr<Range> shared;
std::vector<Range> globals;
const Actor* actor = nullptr;

bool before(const Actor& a, const Actor& b) {
    if (a.block != b.block) return false;
    if (a.thread == b.thread || a.block_phase < b.block_phase) return true;
    return a.thread / kWarp == b.thread / kWarp && a.warp_phase < b.warp_phase;
}

void conflict(const Range& range, uintptr_t at, const char* kind, const Actor& other) {
    fail("race in %s memory at byte %zu: %s block %u thread %u, no barrier since", range.name,
         static_cast<size_t>(at - range.begin), kind, other.block, other.thread);
}

void record(Range& range, uintptr_t at, bool write) {
    History& history = range.grains[(at - range.begin) / kGrain];
    if (history.written && !before(history.writer, *actor)) {
        conflict(range, at, write ? "write after a write of" : "read after a write of", history.writer);
    }
    if (write) {
        for (const Actor& reader : history.readers) {
            if (!before(reader, *actor)) conflict(range, at, "write after a read of", reader);
        }
        history.readers.clear();
        history.written = true;
        history.writer = *actor;
        return;
    }
    size_t kept = 0;
    for (const Actor& reader : history.readers) {
        if (!before(reader, *actor)) history.readers[kept++] = reader;
    }
    history.readers.resize(kept);
    history.readers.push_back(*actor);
}

void record_all(Range& range, uintptr_t begin, uintptr_t end, bool write) {
    for (uintptr_t at = begin / kGrain * kGrain; at < end; at += kGrain) record(range, at, write);
}

}  // namespace

void watch(const void* memory, size_t bytes) { globals.emplace_back(memory, bytes, "global"); }

void unwatch_all() { globals.clear(); }

void start_launch() {
    for (Range& range : globals) range.grains.assign(range.grains.size(), History{});
}

void start_block(const void* memory, size_t bytes) { shared = std::make_unique<Range>(memory, bytes, "shared"); }

void set_actor(const Actor* who) { actor = who; }

void access(const void* memory, size_t bytes, bool write) {
    if (actor == nullptr) return;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory), end = begin + bytes;
    if (shared != nullptr && begin < shared->end() + kGuard && end > shared->begin - kGuard) {
        if (begin < shared->begin || end > shared->end()) {
            fail("%s of %zu bytes outside shared memory: byte %td of %zu", write ? "write" : "read", bytes,
                 static_cast<ptrdiff_t>(begin - shared->begin), static_cast<size_t>(shared->end() - shared->begin));
        }
        record_all(*shared, begin, end, write);
        return;
    }
    for (Range& range : globals) {
        if (begin >= range.begin && end <= range.end()) {
            record_all(range, begin, end, write);
            return;
        }
    }
}

}  // namespace simt::race

// The hooks that g++ calls in code compiled with -fsanitize=thread.
extern "C" {
#define SIMT_HOOKS(bytes)                                                                          \
    void __tsan_read##bytes(void* memory) { simt::race::access(memory, bytes, false); }            \
    void __tsan_write##bytes(void* memory) { simt::race::access(memory, bytes, true); }            \
    void __tsan_unaligned_read##bytes(void* memory) { simt::race::access(memory, bytes, false); }  \
    void __tsan_unaligned_write##bytes(void* memory) { simt::race::access(memory, bytes, true); }
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
#undef SIMT_HOOKS
void __tsan_read_range(void* memory, size_t bytes) { simt::race::access(memory, bytes, false); }
void __tsan_write_range(void* memory, size_t bytes) { simt::race::access(memory, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
