// Finds two accesses to the same memory, one of them a write, with no barrier between them.
//
// The kernels are compiled with -fsanitize=thread, which calls a hook at every access; the hooks are ours (race.cpp), not
// ThreadSanitizer's, because here the threads are fibers and only CUDA's barriers order them: an access comes before another
// if both are of one thread, or __syncthreads() of their block lies between them, or __syncwarp() of their warp does.
// Blocks of one launch are never ordered. Watched are the block's shared memory and the ranges a test names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt::race {

// Who accesses, and how many barriers it has passed.
struct Actor {
    uint32_t block;
    uint32_t thread;  // within the block
    uint32_t block_phase;
    uint32_t warp_phase;
};

constexpr size_t kGuard = 4096;

#if defined(SIMT_RACES)
void watch(const void* memory, size_t bytes);
void unwatch_all();
void start_launch();
void start_block(const void* shared, size_t bytes);

// The actor of the accesses from now on; null: the emulator itself, which is not watched.
void set_actor(const Actor* actor);

// Fails the launch if this access races with an earlier one, or lies in the guard zones around shared memory.
void access(const void* memory, size_t bytes, bool write);
#else
inline void watch(const void*, size_t) {}
inline void unwatch_all() {}
inline void start_launch() {}
inline void start_block(const void*, size_t) {}
inline void set_actor(const Actor*) {}
inline void access(const void*, size_t, bool) {}
#endif

}  // namespace simt::race
