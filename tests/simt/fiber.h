// A stack of its own for every CUDA thread, and the switch between two of them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

class Stack {
public:
    static constexpr size_t kBytes = 256 * 1024;

    Stack() : memory_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
        if (memory_ == MAP_FAILED) abort();
    }
    Stack(Stack&& other) noexcept : memory_(std::exchange(other.memory_, MAP_FAILED)) {}
    Stack& operator=(Stack&&) = delete;
    ~Stack() {
        if (memory_ != MAP_FAILED) munmap(memory_, kBytes);
    }
    void* bottom() const { return memory_; }

private:
    void* memory_;
};

// A place where execution can go on: a fiber that has yielded, or the scheduler while a fiber runs.
struct Context {
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t state;
#endif
    const void* bottom = nullptr;  // of the stack, for AddressSanitizer
    size_t bytes = 0;
    void* fake_stack = nullptr;
};

#if defined(__x86_64__)
// Saves the callee-saved registers on the running stack, stores its pointer in *from, and does the reverse with `to`.
__attribute__((naked, noinline)) inline void switch_stacks(void** /*from*/, void* /*to*/) {
    asm volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
#endif

inline void prepare(Context& fiber, const Stack& stack, void (*entry)()) {
    fiber.bottom = stack.bottom();
    fiber.bytes = Stack::kBytes;
    fiber.fake_stack = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack.bottom(), Stack::kBytes);  // what an abandoned fiber left behind
#endif
#if defined(__x86_64__)
    // As if entry had been called: the stack pointer is 8 off a multiple of 16 when its first instruction runs.
    auto top = reinterpret_cast<void**>(static_cast<unsigned char*>(stack.bottom()) + Stack::kBytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.state);
    fiber.state.uc_stack.ss_sp = stack.bottom();
    fiber.state.uc_stack.ss_size = Stack::kBytes;
    fiber.state.uc_link = nullptr;
    makecontext(&fiber.state, entry, 0);
#endif
}

// Tells AddressSanitizer that a switch has come to an end; `previous` is told where its stack lies.
inline void arrived([[maybe_unused]] Context& here, [[maybe_unused]] Context* previous) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(here.fake_stack, &bottom, &bytes);
    if (previous != nullptr) {
        previous->bottom = bottom;
        previous->bytes = bytes;
    }
#endif
}

// Goes on with `to`; returns when somebody switches back to `from`. `last`: `from` will never go on.
inline void switch_to(Context& from, Context& to, [[maybe_unused]] bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.bottom, to.bytes);
#endif
#if defined(__x86_64__)
    switch_stacks(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.state, &to.state);
#endif
    arrived(from, nullptr);
}

}  // namespace simt
