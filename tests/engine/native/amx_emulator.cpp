// The AMX instructions of engine/native/amx.cpp on processors that have none: they raise SIGILL, and a handler computes what
// the Intel Software Developer's Manual (volume 2) says they do. It ends the process where they would fault.
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kTiles = 8, kRows = 16, kBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  uint8_t bytes[kRows][kBytes] = {};
};

// Of a thread.
struct State {
  bool configured = false;
  Tile tiles[kTiles];
};

thread_local State state;
std::atomic<int> configured_threads{0};
std::atomic<int64_t> products{0};
std::atomic<int> wrong{0};
struct sigaction before;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX would fault: %s\n", what);
  std::abort();
}

// An instruction with VEX prefix: C4, then R X B and map, then W, the inverted third operand, L and prefix, opcode, ModRM.
struct Instruction {
  int map, prefix, opcode, mod, reg, rm, third, length = 5;
  bool wide;
  const char* address = nullptr;  // of the operand in memory
  int64_t stride = 0;             // the index register, scaled

  Instruction(const uint8_t* at, const greg_t* registers) {
    const int extended_reg = at[1] & 0x80 ? 0 : 8, extended_index = at[1] & 0x40 ? 0 : 8, extended_base = at[1] & 0x20 ? 0 : 8;
    map = at[1] & 31, prefix = at[2] & 3, third = ~at[2] >> 3 & 15, wide = at[2] & 0x84, opcode = at[3];
    mod = at[4] >> 6, reg = (at[4] >> 3 & 7) + extended_reg, rm = at[4] & 7;
    if (mod == 3) {
      rm += extended_base;
      return;
    }
    static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    int64_t sum = 0;
    bool has_base = true;
    int base = rm;
    if (rm == 4) {  // SIB
      const int sib = at[length++], index = (sib >> 3 & 7) + extended_index;
      base = sib & 7;
      if (index != 4) stride = int64_t(registers[places[index]]) << (sib >> 6);
    }
    if (mod == 0 && base == 5) {
      has_base = false;
      require(rm == 4, "an address relative to the instruction is not emulated");
    }
    if (has_base) sum = registers[places[base + extended_base]];
    if (mod == 1) sum += int8_t(at[length++]);
    if (mod == 2 || !has_base) {
      int32_t distance;
      std::memcpy(&distance, at + length, 4);
      sum += distance;
      length += 4;
    }
    address = reinterpret_cast<const char*>(sum);
  }
};

void release() {
  configured_threads -= state.configured;
  state = State();
}

void load_config(const char* memory) {
  release();
  const uint8_t* at = reinterpret_cast<const uint8_t*>(memory);
  require(at[0] == 1 && at[1] == 0, "palette 1, first row 0");
  for (int i = 2; i < 16; i++) require(at[i] == 0, "reserved bytes of a configuration are zero");
  for (int i = 0; i < 16; i++) {
    const int bytes = at[16 + 2 * i] | at[17 + 2 * i] << 8, rows = at[48 + i];
    require(rows <= kRows && bytes <= kBytes && !rows == !bytes && (i < kTiles || !rows), "sizes of tiles");
    if (i < kTiles) state.tiles[i].rows = rows, state.tiles[i].row_bytes = bytes;
  }
  state.configured = true;
  configured_threads++;
}

// sums[m][n] += a[m][4 k + i] * b[k][4 n + i], the signs as the prefix says.
void multiply(int prefix, Tile& sums, const Tile& a, const Tile& b) {
  require(&sums != &a && &sums != &b && &a != &b, "three different tiles");
  require(a.rows == sums.rows && b.row_bytes == sums.row_bytes && a.row_bytes == 4 * b.rows && a.row_bytes % 4 == 0 &&
              b.row_bytes % 4 == 0, "sizes of a product");
  const bool a_signed = prefix & 2, b_signed = prefix == 1 || prefix == 3;  // 0 uu, 1 (66) us, 2 (F3) su, 3 (F2) ss
  for (int m = 0; m < sums.rows; m++) {
    int32_t row[kBytes / 4];
    std::memcpy(row, sums.bytes[m], sizeof(row));
    for (int k = 0; k < b.rows; k++)
      for (int n = 0; n < b.row_bytes / 4; n++)
        for (int i = 0; i < 4; i++) {
          const uint8_t x = a.bytes[m][4 * k + i], y = b.bytes[k][4 * n + i];
          row[n] += (a_signed ? int8_t(x) : x) * (b_signed ? int8_t(y) : y);
        }
    row[m % 16] += wrong;
    std::memset(sums.bytes[m], 0, kBytes);
    std::memcpy(sums.bytes[m], row, size_t(sums.row_bytes));
  }
  products++;
}

// False if it is not one of these.
bool run(const Instruction& it) {
  if (it.map != 2 || it.wide) return false;
  if (it.opcode == 0x49 && it.prefix == 0 && it.mod != 3) return load_config(it.address), true;
  if (it.opcode == 0x49 && it.prefix == 0 && it.reg == 0 && it.rm == 0) return release(), true;
  if (it.opcode != 0x49 && it.opcode != 0x4b && it.opcode != 0x5e) return false;
  require(state.configured && it.reg < kTiles && state.tiles[it.reg].rows, "the tile is configured");
  Tile& tile = state.tiles[it.reg];
  if (it.opcode == 0x49 && it.prefix == 3 && it.mod == 3) return std::memset(tile.bytes, 0, sizeof(tile.bytes)), true;
  if (it.opcode == 0x4b && it.mod != 3 && it.rm == 4 && (it.prefix == 2 || it.prefix == 3)) {
    if (it.prefix == 3) std::memset(tile.bytes, 0, sizeof(tile.bytes));
    for (int r = 0; r < tile.rows; r++) {
      char* at = const_cast<char*>(it.address) + r * it.stride;
      it.prefix == 3 ? std::memcpy(tile.bytes[r], at, size_t(tile.row_bytes)) : std::memcpy(at, tile.bytes[r], size_t(tile.row_bytes));
    }
    return true;
  }
  if (it.opcode != 0x5e || it.mod != 3) return false;
  require(it.rm < kTiles && it.third < kTiles, "three of eight tiles");
  return multiply(it.prefix, tile, state.tiles[it.rm], state.tiles[it.third]), true;
}

void handle(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const uint8_t* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  if (at[0] == 0xc4) {
    const Instruction instruction(at, registers);
    if (run(instruction)) return void(registers[REG_RIP] += instruction.length);
  }
  sigaction(SIGILL, &before, nullptr);  // which meets the instruction again
}

}  // namespace

extern "C" {

void emulate_amx() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &before);
}

void stop_emulating_amx() { sigaction(SIGILL, &before, nullptr); }

int64_t emulated_products() { return products; }

// Threads whose tiles are configured.
int configured_amx_threads() { return configured_threads; }

// Whether a sum of each row becomes too large by 1.
void make_amx_wrong(int by) { wrong = by; }
}
