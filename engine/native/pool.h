// Threads for one forward pass. Every thread that calls in has its own pool, so two engines never wait for each other.
//
// OpenMP is not used: its idle workers spin for milliseconds, and here several processes share the cores. A worker of
// ours spins for some tens of microseconds (longer only while that keeps paying off) and then sleeps.
//
// A pass is a row of stages with a barrier after each; all work of a stage is handed out by a counter. Nobody waits for
// a worker that has not woken up yet (on a busy machine that takes milliseconds): it joins at the stage that is running
// when it arrives, and runs through the earlier ones without finding work.
//
// A worker does not stay on the caller's core. Linux wakes it there while the other cores are busy for a moment, and
// does not move it soon, for it has just run: for tenths of a second both computed on one of two cores, and the other
// was three quarters idle (8 rows took 3.0 ms in place of 1.1). On two cores of an AMD EPYC, 8 sessions of 12 M
// parameters over gRPC with rounds of fixed length give 1.05 to 1.27 times the tokens per second so (int8: 1.28), plain
// decoding 1.00 to 1.20 times (int8: 1.18), one session with its draft 1.15 times (servers side by side).
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>

namespace tandem {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that grows, and threads that wait until it has: spin first, then sleep.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void set(uint32_t value);
  void wait_beyond(uint32_t old, int64_t spin_ns);

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
};

// A work list: 0, 1, 2, … are handed out once each. One per cache line.
struct alignas(64) Counter {
  std::atomic<int> taken{0};
};

class Pool;

// What a parallel body sees: its number (below `size`), the work, and a barrier. Every member runs the same stages.
class Team {
 public:
  const int id;
  const int size;

  // Whether this thread takes part in the stage; if not, the stage is over. What a thread reads for itself before its
  // first item, it may read only then.
  bool present() { return member_ || join(); }
  // The next item of this stage's counter, or INT_MAX if the stage is over.
  int next(Counter& counter) {
    if (!present()) return INT_MAX;
    return counter.taken.fetch_add(1, std::memory_order_relaxed);
  }
  // Ends the stage: returns when all its items are done.
  void barrier();

 private:
  friend class Pool;
  Team(Pool* pool, int id, int size, bool member) : id(id), size(size), pool_(pool), member_(member) {}
  bool join();

  Pool* pool_;
  uint32_t stage_ = 0;
  bool member_;
};

class Pool {
 public:
  // The calling thread's own pool, made on first use and joined when the thread ends.
  static Pool& local();

  // Calls body(Team&) on up to `threads` threads (the caller is number 0) and returns when all stages are done.
  template <class Body>
  void run(int threads, Body&& body) {
    struct Call {
      static void invoke(void* object, Team& team) { (*static_cast<Body*>(object))(team); }
    };
    start(threads, &Call::invoke, const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Grow-only memory of the calling thread for one pass, page-aligned; null when there is none.
  void* scratch(size_t bytes);

  ~Pool();

 private:
  friend class Team;
  using Invoke = void (*)(void*, Team&);
  struct Worker {
    Pool* pool;
    int id;
    uint32_t seen;  // the start before its birth
    pthread_t thread{};
    std::atomic<int> core{-1};  // where it last woke up
  };
  static void* main(void* worker);
  void start(int threads, Invoke invoke, void* body);
  int grow(int threads);
  void work(Worker& worker);
  void leave_core_of_caller(int workers);

  // "Start number n, for this many threads"; size 0 sends the workers home.
  static constexpr uint32_t kSizeBits = 12;
  static constexpr int kMostThreads = (1 << kSizeBits) - 1;
  Gate started_;
  // start << 32 | open << 31 | workers inside its body: the body lives on the caller's stack, so a worker enters it
  // only while the pass is open, and the caller leaves only when none is inside.
  alignas(64) std::atomic<uint64_t> inside_{0};
  // stage << 32 | members << 16 | members that have ended the stage.
  alignas(64) std::atomic<uint64_t> meeting_{0};
  Gate stage_;  // the same stage, for those who wait
  alignas(64) Invoke invoke_ = nullptr;
  void* body_ = nullptr;
  Worker** workers_ = nullptr;
  int num_workers_ = 0;
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

}  // namespace tandem
