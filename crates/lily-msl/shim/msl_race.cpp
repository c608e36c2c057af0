// The race build's checker and counters. Kernels are compiled with -fsanitize=thread but linked with these hooks instead
// of the sanitizer's runtime, so every load and store of theirs calls in with its address. A cell of shadow memory for
// each byte remembers who touched it and after which barriers; a log for each lane is turned into counts whenever the
// lanes of a simdgroup meet.
#define MSL_RACE 1
#include "msl_cpu.h"
#include <algorithm>
#include <dlfcn.h>
#include <unordered_map>
#include <vector>
namespace msl {
const void* race_code;  // where the access was written that met a fault
namespace {
// The checker's own copies are none of its business: set while it runs.
bool busy;
struct Busy {
  Busy() { busy = true; }
  ~Busy() { busy = false; }
};

// ---- memory that a dispatch may touch
struct Access {
  u32 tg, barrier, sg_barrier;
  u16 tid;
  u8 atomic, valid;
};
struct Cell {
  Access write, read, other_read;
};
// Buffers that overlap share one shadow; memory that nothing can write needs none.
struct Shadow {
  u8 *lo, *hi;
  Cell* cells;
};
struct Range {
  u8 *lo, *hi;
  int index;
  bool read_only;
  u64 line_offset;
  int shadow;
};
std::vector<Range> ranges;
std::vector<Shadow> shadows;
Cell* arena_cells;
long arena_touched;
enum { ARENA_SPACE = 255, BANKS = 32, LINE = 128 };

Range* find(const u8* p, int n, bool write) {
  Range* part = nullptr;
  for (Range& r : ranges) {
    if (p < r.lo || p >= r.hi) continue;
    if (p + n <= r.hi && !(write && r.read_only)) return &r;
    part = &r;
  }
  return part;
}
// Whether an address lies in this library: its constants and globals. Asking the loader is slow, so pages that are
// known to are remembered.
bool in_image(const void* p) {
  static uintptr_t known[64];
  uintptr_t page = (uintptr_t)p >> 12;
  uintptr_t& slot = known[page & 63];
  if (slot == page) return true;
  Dl_info own, info;
  bool inside = dladdr((const void*)&race_code, &own) && dladdr(p, &info) && info.dli_fbase == own.dli_fbase;
  if (inside) slot = page;
  return inside;
}

// ---- counters: an access of a simdgroup is what its lanes do at one place in the code, the n-th time since they last
// met. Lanes run one after the other here, so each keeps a log, and the logs are laid side by side when they meet.
enum Direction : u8 { LOAD = 1, STORE = 2, UPDATE = LOAD | STORE };
struct Record {
  u32 place;
  u32 bytes;
  u64 at;
  u8 space, direction;
};
std::vector<Record> logs[MAX_THREADS];
std::unordered_map<const void*, u32> places;
struct {
  const void* code;
  u32 place;
} recent[1024];
MslTraffic traffic[MSL_BUFFERS + 1];
u64 tg_read, tg_written, tg_accesses, conflicts;

u32 place_of(const void* code) {
  auto& slot = recent[((uintptr_t)code ^ (uintptr_t)code >> 10) & 1023];
  if (slot.code != code) slot = {code, places.emplace(code, (u32)places.size()).first->second};
  return slot.place;
}
void add(std::vector<u64>& all, u64 x) {
  if (all.empty() || all.back() != x) all.push_back(x);
}
void sort_unique(std::vector<u64>& all) {
  if (!std::is_sorted(all.begin(), all.end())) std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
}
void count_threadgroup(const std::vector<const Record*>& lanes) {
  static std::vector<u64> words;
  words.clear();
  for (const Record* r : lanes) {
    if (r->direction & LOAD) tg_read += r->bytes;
    if (r->direction & STORE) tg_written += r->bytes;
    for (u64 w = r->at / 4; w <= (r->at + r->bytes - 1) / 4; ++w) add(words, w);
  }
  sort_unique(words);
  u64 load[BANKS] = {}, most = 0;
  for (u64 w : words) most = std::max(most, ++load[w % BANKS]);
  tg_accesses++;
  conflicts += most - (words.size() + BANKS - 1) / BANKS;
}
void count_device(const std::vector<const Record*>& lanes) {
  static std::vector<u64> lines;
  lines.clear();
  for (const Record* r : lanes) {
    MslTraffic& t = traffic[r->space];
    if (r->direction & LOAD) t.read_bytes += r->bytes;
    if (r->direction & STORE) t.written_bytes += r->bytes;
    for (u64 l = r->at / LINE; l <= (r->at + r->bytes - 1) / LINE; ++l) add(lines, (u64)r->space << 48 | l);
  }
  sort_unique(lines);
  u8 direction = lanes[0]->direction;
  int space = -1;
  for (u64 l : lines) {
    MslTraffic& t = traffic[l >> 48];
    bool first = space != (int)(l >> 48);
    if (direction & LOAD) {
      t.read_lines++;
      t.read_accesses += first;
    }
    if (direction & STORE) {
      t.written_lines++;
      t.written_accesses += first;
    }
    space = l >> 48;
  }
}
void count(const std::vector<const Record*>& lanes) {
  if (lanes[0]->space == ARENA_SPACE)
    count_threadgroup(lanes);
  else
    count_device(lanes);
}
// Lanes that went different ways: a number for each pair of place and occurrence; the records of one number are one access.
void count_apart(int first, int last) {
  static std::vector<u32> most, seen, base, touched;
  static std::vector<std::vector<const Record*>> groups;
  if (most.size() < places.size()) {
    most.resize(places.size());
    seen.resize(places.size());
    base.resize(places.size());
  }
  touched.clear();
  for (int i = first; i < last; ++i) {
    for (const Record& r : logs[i]) {
      if (!most[r.place]) touched.push_back(r.place);
      most[r.place] = std::max(most[r.place], ++seen[r.place]);
    }
    for (const Record& r : logs[i]) seen[r.place] = 0;
  }
  u32 total = 0;
  for (u32 p : touched) {
    base[p] = total;
    total += most[p];
    most[p] = 0;
  }
  if (groups.size() < total) groups.resize(total);
  for (int i = first; i < last; ++i) {
    for (const Record& r : logs[i]) groups[base[r.place] + seen[r.place]++].push_back(&r);
    for (const Record& r : logs[i]) seen[r.place] = 0;
  }
  for (u32 g = 0; g < total; ++g) {
    count(groups[g]);
    groups[g].clear();
  }
}
}  // namespace

void race_flush(int simdgroup) {
  Busy guard;
  int first = simdgroup * 32, last = std::min(first + 32, C->nlanes);
  // In most accesses the lanes go the same way: then the n-th records of all logs belong together.
  size_t length = logs[first].size();
  bool together = true;
  for (int i = first + 1; i < last && together; ++i) {
    together = logs[i].size() == length;
    for (size_t n = 0; n < length && together; ++n) together = logs[i][n].place == logs[first][n].place;
  }
  static std::vector<const Record*> lanes;
  if (together) {
    for (size_t n = 0; n < length; ++n) {
      lanes.clear();
      for (int i = first; i < last; ++i) lanes.push_back(&logs[i][n]);
      count(lanes);
    }
  } else {
    count_apart(first, last);
  }
  for (int i = first; i < last; ++i) logs[i].clear();
}

namespace {
// ---- races
// Whether two atomic accesses may meet without a barrier: a plain store may not meet anything, nor a load an update.
bool both_atomic(u8 a, u8 b) { return a && b && a == b && a != 2; }
bool ordered(const Access& a, bool device) {
  if (a.tg != C->tgid_linear) return !device;  // threadgroup memory is another threadgroup's by then
  if (a.tid == C->cur->tid) return true;
  if (a.barrier != (device ? C->dev_epoch : C->tg_epoch)) return true;
  return a.tid / 32 == C->cur->sgi && a.sg_barrier != (device ? mysg().dev_epoch : mysg().tg_epoch);
}
const char* name(int index) {
  static char text[32];
  if (index < 0) return "threadgroup memory";
  snprintf(text, sizeof text, "buffer %d", index);
  return text;
}
[[noreturn]] void race(const char* kind, const Access& a, int index, long at) {
  const Lane& l = *C->cur;
  fail(RACE,
       "%s on %s at byte %ld: thread %d of threadgroup %u against thread %d of threadgroup %u (this thread last met "
       "others in %s, %s:%d)",
       kind, name(index), at, l.tid, C->tgid_linear, a.tid, a.tg, l.what, l.site.file, l.site.line);
}
[[gnu::noinline]] void touch(const volatile void* pointer, u32 n, bool write, u8 atomic, const void* code,
                             bool aligned) {
  if (busy || !C || !C->cur || C->error) return;
  Busy guard;
  u8* p = (u8*)pointer;
  race_code = code;
  u8 direction = atomic == 3 ? UPDATE : write ? STORE : LOAD;
  bool device;
  Cell* cells;
  long at;
  int index = -1;
  if (p >= C->arena && p < C->arena + ARENA) {
    device = false;
    at = p - C->arena;
    cells = arena_cells + at;
    auto within = [&](void* start, u32 bytes) { return p >= (u8*)start && p + n <= (u8*)start + bytes; };
    bool in = false;
    for (int i = 0; i < C->nslots; ++i) in = in || within(C->slots[i], C->slot_bytes[i]);
    for (u32 i = 0; i < C->dispatch->threadgroup_count; ++i)
      in = in || within(C->tgparam[i], C->dispatch->threadgroup_bytes[i]);
    if (!in) fail(OUT_OF_BOUNDS, "%u bytes of threadgroup memory at byte %ld, outside of every variable", n, at);
    if (C->dispatch->counters_only) cells = nullptr;
    arena_touched = std::max(arena_touched, at + n);
    logs[C->cur->tid].push_back({place_of(code), n, (u64)at, ARENA_SPACE, direction});
  } else if (Range* r = find(p, n, write)) {
    device = true;
    at = p - r->lo;
    if (p + n > r->hi)
      fail(OUT_OF_BOUNDS, "%u bytes at byte %ld of buffer %d, which has %ld", n, at, r->index, (long)(r->hi - r->lo));
    if (write && r->read_only) fail(OUT_OF_BOUNDS, "a store to buffer %d, which is bound read-only", r->index);
    index = r->index;
    Shadow& s = shadows[r->shadow];
    cells = s.cells ? s.cells + (p - s.lo) : nullptr;
    logs[C->cur->tid].push_back({place_of(code), n, at + r->line_offset, (u8)r->index, direction});
  } else {
    // Stacks, the runtime's own memory and the library's constants are no business of the checker.
    if (p >= C->stacks && p < C->stacks + (size_t)MAX_THREADS * STACK) return;
    if (p >= (u8*)C && p < (u8*)C + sizeof(Ctx)) return;
    if (C->args->buf && p >= (u8*)C->args->buf && p < (u8*)(C->args->buf + C->args->nbuf)) return;
    if (in_image(p)) return;
    const Range* near = nullptr;
    long best = 1l << 62;
    for (Range& r : ranges) {
      long away = p < r.lo ? r.lo - p : p - r.hi;
      if (away < best) best = away, near = &r;
    }
    fail(OUT_OF_BOUNDS, "%u bytes in no buffer; byte %ld from the start of buffer %d, which has %ld", n,
         near ? (long)(p - near->lo) : 0, near ? near->index : -1, near ? (long)(near->hi - near->lo) : 0);
  }
  if (aligned && (uintptr_t)p % n)
    fail(MISALIGNED, "%u bytes at byte %ld of %s, not a multiple of %u", n, at, name(index), n);
  if (!cells) return;
  Access now{C->tgid_linear,
             device ? C->dev_epoch : C->tg_epoch,
             device ? mysg().dev_epoch : mysg().tg_epoch,
             C->cur->tid,
             atomic,
             1};
  auto clash = [&](const Access& a) { return a.valid && !both_atomic(a.atomic, atomic) && !ordered(a, device); };
  for (u32 i = 0; i < n; ++i) {
    Cell& x = cells[i];
    if (!device && !write && !(x.write.valid && x.write.tg == now.tg))
      fail(UNINITIALISED, "a load of threadgroup memory that was never written, at byte %ld", at + i);
    if (clash(x.write)) race(write ? "write after write" : "read after write", x.write, index, at + i);
    if (write) {
      if (clash(x.read)) race("write after read", x.read, index, at + i);
      if (clash(x.other_read)) race("write after read", x.other_read, index, at + i);
      x.write = now;
    } else {
      if (x.read.valid && x.read.tid != now.tid) x.other_read = x.read;
      x.read = now;
    }
  }
}
}  // namespace

void race_atomic(const volatile void* p, int bytes, int kind) {
  touch(p, bytes, kind != 1, kind, __builtin_return_address(0), true);
}

void race_begin(const MslDispatch& d) {
  race_code = nullptr;
  busy = false;  // a fault left it set
  ranges.clear();
  shadows.clear();
  for (u32 i = 0; i < d.buffer_count; ++i) {
    const MslBuffer& b = d.buffers[i];
    if (b.pointer)
      ranges.push_back({(u8*)b.pointer, (u8*)b.pointer + b.bytes, (int)std::min<u32>(i, MSL_BUFFERS),
                        b.read_only != 0, b.line_offset, 0});
  }
  std::vector<Range*> order;
  std::vector<bool> written;
  for (Range& r : ranges) order.push_back(&r);
  std::sort(order.begin(), order.end(), [](Range* a, Range* b) { return a->lo < b->lo; });
  for (Range* r : order) {
    if (shadows.empty() || r->lo >= shadows.back().hi) {
      shadows.push_back({r->lo, r->hi, nullptr});
      written.push_back(false);
    }
    Shadow& s = shadows.back();
    s.hi = std::max(s.hi, r->hi);
    r->shadow = (int)shadows.size() - 1;
    if (!r->read_only) written.back() = true;
  }
  if (!d.counters_only)
    for (size_t i = 0; i < shadows.size(); ++i)
      if (written[i]) shadows[i].cells = (Cell*)calloc(shadows[i].hi - shadows[i].lo, sizeof(Cell));
  if (!arena_cells) arena_cells = (Cell*)calloc(ARENA, sizeof(Cell));
  memset(arena_cells, 0, arena_touched * sizeof(Cell));
  arena_touched = 0;
  for (auto& log : logs) log.clear();
  memset(traffic, 0, sizeof traffic);
  tg_read = tg_written = tg_accesses = conflicts = 0;
}
void race_end(MslReport& r) {
  for (Shadow& s : shadows) {
    free(s.cells);
    s.cells = nullptr;
  }
  memcpy(r.buffers, traffic, sizeof traffic);
  r.threadgroup_read_bytes = tg_read;
  r.threadgroup_written_bytes = tg_written;
  r.threadgroup_accesses = tg_accesses;
  r.bank_conflicts = conflicts;
  // Only what an access met has a place in the code: a divergence is reported by the lines of its operations.
  if (r.fault == DIVERGENCE || r.fault == LIMIT) race_code = nullptr;
}
}  // namespace msl

// ------------------------------------------------------------------ what the compiler's instrumentation calls
using msl::touch;
extern "C" {
#define MSL_HOOK(n)                                                                                     \
  void __tsan_read##n(void* p) { touch(p, n, false, 0, __builtin_return_address(0), true); }            \
  void __tsan_write##n(void* p) { touch(p, n, true, 0, __builtin_return_address(0), true); }            \
  void __tsan_volatile_read##n(void* p) { touch(p, n, false, 0, __builtin_return_address(0), true); }   \
  void __tsan_volatile_write##n(void* p) { touch(p, n, true, 0, __builtin_return_address(0), true); }   \
  void __tsan_unaligned_read##n(void* p) { touch(p, n, false, 0, __builtin_return_address(0), false); } \
  void __tsan_unaligned_write##n(void* p) { touch(p, n, true, 0, __builtin_return_address(0), false); }
MSL_HOOK(1) MSL_HOOK(2) MSL_HOOK(4) MSL_HOOK(8) MSL_HOOK(16) void __tsan_read_range(void* p, long n) {
  touch(p, (msl::u32)n, false, 0, __builtin_return_address(0), false);
}
void __tsan_write_range(void* p, long n) { touch(p, (msl::u32)n, true, 0, __builtin_return_address(0), false); }
// clang turns copies of some size into calls: of __tsan_memcpy and so on, or, before those existed, of the C library's
// functions. For these the linker is told to put in the second set (--wrap).
#define MSL_COPY(name) \
  void* name(void* to, const void* from, size_t n) { \
    if (n) touch(from, (msl::u32)n, false, 0, __builtin_return_address(0), false); \
    if (n) touch(to, (msl::u32)n, true, 0, __builtin_return_address(0), false); \
    return MSL_REAL(memmove)(to, from, n); \
  }
#define MSL_FILL(name) \
  void* name(void* to, int byte, size_t n) { \
    if (n) touch(to, (msl::u32)n, true, 0, __builtin_return_address(0), false); \
    return MSL_REAL(memset)(to, byte, n); \
  }
#ifdef MSL_WRAP
void* __real_memmove(void*, const void*, size_t);
void* __real_memset(void*, int, size_t);
#define MSL_REAL(name) __real_##name
MSL_COPY(__wrap_memcpy)
MSL_COPY(__wrap_memmove)
MSL_FILL(__wrap_memset)
#else
#define MSL_REAL(name) name
#endif
MSL_COPY(__tsan_memcpy)
MSL_COPY(__tsan_memmove)
MSL_FILL(__tsan_memset)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
}
