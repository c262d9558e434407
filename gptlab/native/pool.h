// Threads that share the tasks of one phase after another.
//
// A phase is a count of tasks and a function; whoever is free takes the next one, so a thread that the system puts aside
// delays no more than the task it holds. Which thread takes a task never shows in the result: tasks write disjoint places
// and every sum has its own fixed order. Waiting threads spin for some microseconds, then sleep.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) helpers_.emplace_back([this, i] { help(i); });
  }

  ~Pool() {
    ending_.store(true);
    publish(nullptr, nullptr, 0);
    for (auto& helper : helpers_) helper.join();
  }

  int threads() const { return threads_; }

  // Calls f(task, thread) for each task in 0..count-1 and returns when all are done.
  template <class F>
  void run(int count, F f) {
    if (threads_ == 1 || count == 1) {
      for (int task = 0; task < count; task++) f(task, 0);
      return;
    }
    publish([](void* context, int task, int thread) { (*static_cast<F*>(context))(task, thread); }, &f, count);
    while (take(0)) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++)
      spins < 4096 ? _mm_pause() : static_cast<void>(sched_yield());
  }

 private:
  using Call = void (*)(void*, int, int);
  struct Job {
    std::atomic<Call> call{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int> count{0};
  };

  // Two jobs in turn: a thread that comes late reads the old one, and its ticket then no longer fits.
  void publish(Call call, void* context, int count) {
    const uint64_t phase = (ticket_.load() >> 32) + 1;
    Job& job = jobs_[phase & 1];
    job.call.store(call);
    job.context.store(context);
    job.count.store(count);
    done_.store(0);
    ticket_.store(phase << 32);
    ticket_.notify_all();
  }

  // Does one task of the present phase; false where none is left.
  bool take(int thread) {
    uint64_t ticket = ticket_.load();
    while (true) {
      Job& job = jobs_[(ticket >> 32) & 1];
      const Call call = job.call.load();
      void* context = job.context.load();
      const int task = static_cast<int>(ticket & 0xffffffff);
      if (task >= job.count.load()) return false;
      if (ticket_.compare_exchange_strong(ticket, ticket + 1)) {
        call(context, task, thread);
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void help(int thread) {
    while (!ending_.load()) {
      uint64_t seen = ticket_.load();
      while (take(thread)) {
      }
      int spins = 0;
      while ((ticket_.load(std::memory_order_acquire) >> 32) == (seen >> 32) && ++spins < 2000) _mm_pause();
      if (spins >= 2000) {
        seen = ticket_.load();
        const Job& job = jobs_[(seen >> 32) & 1];
        if (static_cast<int>(seen & 0xffffffff) >= job.count.load() && !ending_.load()) ticket_.wait(seen);
      }
    }
  }

  const int threads_;
  std::vector<std::thread> helpers_;
  Job jobs_[2];
  alignas(64) std::atomic<uint64_t> ticket_{0};  // phase << 32 | next task
  alignas(64) std::atomic<int> done_{0};
  std::atomic<bool> ending_{false};
};
