// Threads for one forward pass. Every thread that calls in has its own team, so two engines never wait for each other.
//
// OpenMP is not used: its idle workers spin for milliseconds, and here several processes share the cores. A worker of
// ours spins for some tens of microseconds (longer only while that keeps paying off) and then sleeps.
#pragma once

#include <pthread.h>

#include <atomic>
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

// A number that grows, and threads that wait for it to change: spin first, then sleep.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void set(uint32_t value);
  // Returns true if the change came while spinning.
  bool wait_change(uint32_t old, int64_t spin_ns);

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
};

class Pool;

// What a parallel body sees: who it is, how many there are, and a barrier.
struct Team {
  Pool* pool;
  int id;
  int size;
  void barrier() const;
};

// A shared work list: next() hands out 0, 1, 2, … once each. One per cache line.
struct alignas(64) Counter {
  std::atomic<int> taken{0};
  int next() { return taken.fetch_add(1, std::memory_order_relaxed); }
};

class Pool {
 public:
  // The calling thread's own pool, made on first use and joined when the thread ends.
  static Pool& local();

  // Calls body(Team) on `threads` threads (the caller is number 0) and returns when all are done.
  template <class Body>
  void run(int threads, Body&& body) {
    struct Call {
      static void invoke(void* object, const Team& team) { (*static_cast<Body*>(object))(team); }
    };
    start(threads, &Call::invoke, const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Grow-only memory of the calling thread for one pass, 64-byte aligned; null when there is none.
  void* scratch(size_t bytes);

  void barrier(int size);
  ~Pool();

 private:
  using Invoke = void (*)(void*, const Team&);
  struct Worker {
    Pool* pool;
    int id;
    uint32_t seen;  // the start before its birth
    pthread_t thread;
  };
  static void* main(void* worker);
  void start(int threads, Invoke invoke, void* body);
  int grow(int threads);
  void work(int id, uint32_t seen);

  // One number says "start number n, for this many threads", so that a worker left out of a start can never mistake
  // the next one's size for its own: only workers that take part read invoke_ and body_, and start() waits for those.
  static constexpr uint32_t kSizeBits = 12;
  Gate started_;
  Gate phase_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) Invoke invoke_ = nullptr;
  void* body_ = nullptr;
  Worker** workers_ = nullptr;
  int num_workers_ = 0;
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

inline void Team::barrier() const {
  if (size > 1) pool->barrier(size);
}

}  // namespace tandem
