// Memory that a thread keeps from one task to the next.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <vector>

#include "run.h"

namespace qwenrt {

struct alignas(64) CacheLine {
  int8_t bytes[64];
};

// `count` elements of this thread's own, from the start of a cache line, what is in them unknown, until the next call with the same
// Purpose. Throws std::bad_alloc.
template <class Purpose, class Element = int8_t>
Element* thread_scratch(int64_t count) {
  thread_local std::vector<CacheLine> memory;
  const size_t lines = (static_cast<size_t>(count) * sizeof(Element) + sizeof(CacheLine) - 1) / sizeof(CacheLine);
  if (memory.size() < lines) memory.resize(lines);
  return reinterpret_cast<Element*>(memory.data());
}

// Runs work(task, scratch) with `count` elements of the thread that it runs on. Throws std::bad_alloc if there is no memory.
template <class Element, class Work>
void run_with_scratch(const Parallel& parallel, int64_t tasks, int64_t count, const Work& work) {
  std::atomic<bool> out_of_memory{false};
  parallel.run(tasks, [&](int64_t task) {
    Element* scratch;
    try {
      scratch = thread_scratch<Work, Element>(count);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
      return;
    }
    work(task, scratch);
  });
  if (out_of_memory) throw std::bad_alloc();
}

}  // namespace qwenrt
