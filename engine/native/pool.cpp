#include "pool.h"

#include "amx.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

namespace tandem {

namespace {

constexpr int64_t kBarrierSpinNs = 40'000;
constexpr int64_t kIdleSpinMinNs = 5'000;
constexpr int64_t kIdleSpinMaxNs = 200'000;
constexpr uint64_t kOpen = uint64_t(1) << 31;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// A pool does not survive fork(): the child has the memory but not the threads.
struct Local {
  Pool* pool = nullptr;
  pid_t owner = 0;
  ~Local() {
    if (pool && owner == getpid()) delete pool;
  }
};
thread_local Local local_pool;

}  // namespace

void Gate::set(uint32_t value) {
  value_.store(value, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  pthread_mutex_lock(&mutex_);
  pthread_cond_broadcast(&changed_);
  pthread_mutex_unlock(&mutex_);
}

void Gate::wait_beyond(uint32_t old, int64_t spin_ns) {
  int64_t deadline = 0;
  for (;;) {
    for (int i = 0; i < 64; i++) {
      if (int32_t(value() - old) > 0) return;
      relax();
    }
    int64_t now = now_ns();
    if (deadline == 0) deadline = now + spin_ns;
    if (now >= deadline) break;
  }
  pthread_mutex_lock(&mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (int32_t(value_.load(std::memory_order_seq_cst) - old) <= 0) pthread_cond_wait(&changed_, &mutex_);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  pthread_mutex_unlock(&mutex_);
}

Pool& Pool::local() {
  Local& local = local_pool;
  if (!local.pool || local.owner != getpid()) {
    local.pool = new Pool;  // after fork() the parent's is left alone
    local.owner = getpid();
  }
  return *local.pool;
}

// Becomes a member if this stage is still running, or false: it is over.
bool Team::join() {
  uint64_t now = pool_->meeting_.load(std::memory_order_acquire);
  for (;;) {
    const uint32_t members = uint32_t(now >> 16) & 0xffff, ended = uint32_t(now) & 0xffff;
    if (uint32_t(now >> 32) != stage_ || ended == members) return false;
    if (pool_->meeting_.compare_exchange_weak(now, now + (1 << 16), std::memory_order_acq_rel)) return member_ = true;
  }
}

void Team::barrier() {
  if (size == 1) return;
  const uint32_t stage = stage_++;
  if (!member_) {  // the stage was over when we came: wait until the last of its members has said so
    if (uint32_t(pool_->meeting_.load(std::memory_order_acquire) >> 32) == stage)
      pool_->stage_.wait_beyond(stage, kBarrierSpinNs);
    return;
  }
  const uint64_t now = pool_->meeting_.fetch_add(1, std::memory_order_acq_rel) + 1;
  const uint64_t members = (now >> 16) & 0xffff;
  if ((now & 0xffff) == members) {
    pool_->meeting_.store(uint64_t(stage + 1) << 32 | members << 16, std::memory_order_release);
    pool_->stage_.set(stage + 1);
  } else {
    pool_->stage_.wait_beyond(stage, kBarrierSpinNs);
  }
}

// Starts workers until there are threads - 1; returns how many threads a region can have.
int Pool::grow(int threads) {
  if (threads > kMostThreads) threads = kMostThreads;
  if (threads - 1 > num_workers_) {
    void* bigger = realloc(workers_, sizeof(Worker*) * size_t(threads - 1));
    if (!bigger) return num_workers_ + 1;
    workers_ = static_cast<Worker**>(bigger);
  }
  while (num_workers_ < threads - 1) {
    Worker* worker = new Worker{this, num_workers_ + 1, started_.value()};
    if (pthread_create(&worker->thread, nullptr, &Pool::main, worker) != 0) {
      delete worker;
      break;
    }
    workers_[num_workers_++] = worker;
  }
  return threads < num_workers_ + 1 ? threads : num_workers_ + 1;
}

void* Pool::main(void* arg) {
  Worker* worker = static_cast<Worker*>(arg);
  worker->pool->work(*worker);
  return nullptr;
}

// Has workers that last woke on the caller's core run on the others that the caller may use from now on.
void Pool::leave_core_of_caller(int workers) {
#if defined(__linux__)
  const int core = sched_getcpu();
  for (int i = 0; i < workers; i++) {
    if (core < 0 || core >= CPU_SETSIZE || workers_[i]->core.load(std::memory_order_relaxed) != core) continue;
    cpu_set_t others;
    if (sched_getaffinity(0, sizeof(others), &others) != 0) return;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0) return;
    pthread_setaffinity_np(workers_[i]->thread, sizeof(others), &others);
    workers_[i]->core.store(-1, std::memory_order_relaxed);
  }
#endif
}

void Pool::work(Worker& worker) {
  const int id = worker.id;
  uint32_t seen = worker.seen;
  int64_t spin_ns = kIdleSpinMinNs;
  for (;;) {
    if (started_.value() == seen) {
      int64_t since = now_ns();
      started_.wait_beyond(seen, spin_ns);
      // Spin about as long as the pause that just ended, if it was short enough to be worth a core.
      int64_t paused = now_ns() - since;
      spin_ns = paused < kIdleSpinMaxNs ? 2 * paused : spin_ns / 2;
      if (spin_ns < kIdleSpinMinNs) spin_ns = kIdleSpinMinNs;
      if (spin_ns > kIdleSpinMaxNs) spin_ns = kIdleSpinMaxNs;
    }
    seen = started_.value();
#if defined(__linux__)
    worker.core.store(sched_getcpu(), std::memory_order_relaxed);
#endif
    const int size = int(seen & ((1u << kSizeBits) - 1));
    if (size == 0) return;
    if (id >= size) continue;
    uint64_t now = inside_.load(std::memory_order_acquire);
    const uint64_t open = uint64_t(seen) << 32 | kOpen;
    bool entered = false;
    while ((now & ~uint64_t(kOpen - 1)) == open && !entered)
      entered = inside_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel);
    if (!entered) continue;  // that pass is over
    Team team(this, id, size, false);
    invoke_(body_, team);
    release_amx();
    team.barrier();
    inside_.fetch_sub(1, std::memory_order_release);
  }
}

void Pool::start(int threads, Invoke invoke, void* body) {
  const int size = threads > 1 ? grow(threads) : 1;
  Team team(this, 0, size, true);
  if (size == 1) {
    invoke(body, team);
    return release_amx();
  }
  invoke_ = invoke;
  body_ = body;
  meeting_.store(1 << 16, std::memory_order_relaxed);
  stage_.set(0);
  const uint32_t number = (((started_.value() >> kSizeBits) + 1) << kSizeBits) | uint32_t(size);
  inside_.store(uint64_t(number) << 32 | kOpen, std::memory_order_release);
  leave_core_of_caller(size - 1);
  started_.set(number);
  invoke(body, team);
  release_amx();
  team.barrier();
  inside_.fetch_and(~uint64_t(kOpen), std::memory_order_acq_rel);
  for (int i = 0; inside_.load(std::memory_order_acquire) & (kOpen - 1); i++) {
    relax();
    if (i > 1000) sched_yield();
  }
}

void* Pool::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    free(scratch_);
    scratch_bytes_ = 0;
    scratch_ = nullptr;
    bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    if (posix_memalign(&scratch_, 4096, bytes) != 0) return scratch_ = nullptr;
    scratch_bytes_ = bytes;
  }
  return scratch_;
}

Pool::~Pool() {
  started_.set(((started_.value() >> kSizeBits) + 1) << kSizeBits);  // size 0: go home
  for (int i = 0; i < num_workers_; i++) {
    pthread_join(workers_[i]->thread, nullptr);
    delete workers_[i];
  }
  free(workers_);
  free(scratch_);
}

}  // namespace tandem
