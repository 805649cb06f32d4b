#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace mlxcel {

namespace {

constexpr auto kSpin = std::chrono::microseconds(100);

class Pool {
 public:
  // Of `count` threads the caller is one. Where the system grants no more, those that there are must do.
  explicit Pool(int count) {
    try {
      for (int i = 1; i < count; i++) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // The system gives no more threads: those that are there share the work.
    }
  }

  ~Pool() {
    ending_ = true;
    generation_++;
    { std::lock_guard lock(mutex_); }
    called_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return int(workers_.size()) + 1; }

  void run(int64_t count, const std::function<void(int64_t)>& task) {
    task_ = &task;
    count_ = count;
    next_ = 1;
    open_ = true;
    generation_++;
    if (parked_ > 0) {
      { std::lock_guard lock(mutex_); }
      called_.notify_all();
    }
    take(0);
    open_ = false;
    // Whoever came in before the door closed holds a task; whoever comes later sees it closed.
    for (int turn = 0; inside_ > 0; turn++) turn < 1000 ? pause() : std::this_thread::yield();
    if (fault_) std::rethrow_exception(std::exchange(fault_, nullptr));
  }

 private:
  // Task `i` and then whatever is left. A task that fails ends this thread's part alone, whose others go on.
  void take(int64_t i) {
    try {
      for (; i < count_; i = next_++) (*task_)(i);
    } catch (...) {
      std::lock_guard lock(mutex_);
      fault_ = std::current_exception();
    }
  }

  void work() {
    uint64_t seen = 0;
    while (true) {
      await(seen);
      seen = generation_;
      if (ending_) return;
      inside_++;
      if (open_) take(next_++);
      inside_--;
    }
  }

  void await(uint64_t seen) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; i++) {
        if (generation_ != seen) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock lock(mutex_);
    parked_++;
    called_.wait(lock, [&] { return generation_ != seen; });
    parked_--;
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable called_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> parked_{0};
  std::atomic<int> inside_{0};
  std::atomic<bool> open_{false};
  std::atomic<bool> ending_{false};
  std::atomic<int64_t> next_{0};
  int64_t count_ = 0;
  const std::function<void(int64_t)>* task_ = nullptr;
  std::exception_ptr fault_;
};

std::mutex turn;  // one call at a time has the pool; the pool is never destroyed, its threads may outlive main

Pool*& pool() {
  static Pool* pool = new Pool(1);
  return pool;
}

// Apart from the pool, so that to ask for it neither waits for a call nor keeps one from the pool.
std::atomic<int>& size() {
  static std::atomic<int> size{1};
  return size;
}

}  // namespace

int num_threads() { return size(); }

void set_num_threads(int count) {
  std::lock_guard lock(turn);
  if (count == pool()->size()) return;
  Pool* next = new Pool(count < 1 ? 1 : count);
  delete std::exchange(pool(), next);
  size() = pool()->size();
}

void share(int64_t count, const std::function<void(int64_t)>& task) {
  std::unique_lock lock(turn, std::try_to_lock);
  if (lock.owns_lock() && count > 1 && pool()->size() > 1) return pool()->run(count, task);
  for (int64_t i = 0; i < count; i++) task(i);
}

float* scratch(int64_t count) {
  thread_local std::unique_ptr<float[]> floats;
  thread_local int64_t size = 0;
  if (size < count) {
    floats = std::make_unique<float[]>(count);
    size = count;
  }
  return floats.get();
}

}  // namespace mlxcel
