#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace qwenrt {
namespace {

class Pool {
 public:
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(int64_t helpers, int64_t tasks, const std::function<void(int64_t)>& work) {
    const std::lock_guard turn(turn_);
    helpers = std::min(helpers, tasks - 1);
    {
      const std::lock_guard lock(mutex_);
      while (static_cast<int64_t>(threads_.size()) < helpers)
        threads_.emplace_back([this, index = static_cast<int64_t>(threads_.size())] { serve(index); });
      work_ = &work, tasks_ = tasks, helpers_ = running_ = std::max(helpers, int64_t{0});
      next_ = 0;
      ++round_;
    }
    wake_.notify_all();
    take_tasks();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void take_tasks() {
    for (int64_t task = next_++; task < tasks_; task = next_++) (*work_)(task);
  }

  void serve(int64_t index) {
    int64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || (round_ != seen && index < helpers_); });
      if (stop_) return;
      seen = round_;
      lock.unlock();
      take_tasks();
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  const std::function<void(int64_t)>* work_ = nullptr;
  int64_t tasks_ = 0, helpers_ = 0, running_ = 0, round_ = 0;
  std::atomic<int64_t> next_{0};
  bool stop_ = false;
};

Pool& pool() {
  static Pool instance;
  return instance;
}

}  // namespace

Parallel thread_pool(int threads) {
  const int64_t count = threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
  return {[count](int64_t tasks, const std::function<void(int64_t)>& work) {
            if (tasks > 0) pool().run(count - 1, tasks, work);
          },
          count};
}

}  // namespace qwenrt
