// The pool alone, as `make sanitize` runs it: what cannot be reached from Python. Ends with 1 where something is wrong.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// A call of `count` tasks: each adds one to a number of its own, which nothing guards.
void call(std::vector<int>& numbers) {
  mlxcel::share(int64_t(numbers.size()), [&](int64_t i) {
    mlxcel::scratch(64)[i % 64] = float(i);
    numbers[i]++;
  });
}

void every_task_runs_once() {
  for (int threads : {1, 2, 3, 8}) {
    mlxcel::set_num_threads(threads);
    expect(mlxcel::num_threads() == threads, "the pool has another size than it was given");
    for (int64_t count : {0, 1, 2, 7, 100}) {
      std::vector<int> numbers(count);
      for (int i = 0; i < 500; i++) call(numbers);
      for (int number : numbers) expect(number == 500, "a task ran twice or never");
    }
  }
}

void parked_threads_come_back() {
  mlxcel::set_num_threads(3);
  std::vector<int> numbers(8);
  for (int i = 0; i < 200; i++) {
    std::this_thread::sleep_for(std::chrono::microseconds(i));  // around the moment at which they park
    call(numbers);
  }
  for (int number : numbers) expect(number == 200, "a task ran twice or never after threads had parked");
}

void the_first_task_is_the_callers() {
  mlxcel::set_num_threads(4);
  for (int i = 0; i < 2000; i++) {
    std::thread::id first;
    mlxcel::share(2, [&](int64_t task) {
      if (task == 0) first = std::this_thread::get_id();
    });
    expect(first == std::this_thread::get_id(), "another thread took the first task");
  }
}

void a_task_that_fails_is_told_to_the_caller() {
  mlxcel::set_num_threads(3);
  for (int i = 0; i < 500; i++) {
    bool told = false;
    try {
      mlxcel::share(16, [&](int64_t task) {
        if (task % 8 == i % 8) throw std::runtime_error("as asked");
      });
    } catch (const std::runtime_error&) {
      told = true;
    }
    expect(told, "a failure got lost");
    std::vector<int> numbers(16);
    call(numbers);
    for (int number : numbers) expect(number == 1, "the call after a failure is wrong");
  }
}

void threads_are_set_while_others_call() {
  std::atomic<bool> ended{false};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; caller++)
    callers.emplace_back([&] {
      std::vector<int> numbers(9);
      int calls = 0;
      for (; !ended; calls++) call(numbers);
      for (int number : numbers) expect(number == calls, "a task ran twice or never while threads were set");
    });
  for (int i = 0; i < 1000; i++) {
    mlxcel::set_num_threads(1 + i % 4);
    mlxcel::num_threads();
  }
  ended = true;
  for (auto& caller : callers) caller.join();
}

}  // namespace

int main() {
  every_task_runs_once();
  parked_threads_come_back();
  the_first_task_is_the_callers();
  a_task_that_fails_is_told_to_the_caller();
  threads_are_set_while_others_call();
  mlxcel::set_num_threads(4);  // which are parked, or about to, when the process ends
}
