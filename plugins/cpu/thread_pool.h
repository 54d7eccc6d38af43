// Threads for callers that bring none.
#pragma once

#include "run.h"

namespace qwenrt {

// A way to run tasks on `threads` threads (0: one per core), the caller's among them. They start with the first use and stay. Calls
// from several threads take turns.
Parallel thread_pool(int threads);

}  // namespace qwenrt
