// Products of packed weights on a processor that the tests' Python does not run on: `make kernels` runs this under QEMU.
// Each row is compared to the bit with itself alone, for every format and several shapes, numbers of rows and threads, and
// prefetch distances; and with sums in float64.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

extern "C" {
int tandem_panel();
int64_t tandem_packed_bytes(int dtype, int64_t panels, int64_t k);
void* tandem_alloc(int64_t bytes);
void tandem_free(void* memory);
void tandem_pack(int dtype, const void* weight, const float* scales, int64_t n, int64_t k, int64_t stride, void* packed,
                 int64_t first_panel, int64_t panel_step, int threads);
// engine/native/grouped.cpp
struct GroupedSource {
  const void* codes;
  const int8_t* table;
  const float *values, *scales, *offsets;
  const int32_t* order;
  int64_t n, k, group;
  int32_t bits, kind;
};
int64_t tandem_grouped_panel_bytes(const GroupedSource* source);
void tandem_pack_grouped(const GroupedSource* source, char* memory, int64_t memory_step, const uint8_t** list,
                         int64_t first_panel, int64_t panel_step, int threads);
int tandem_linear(int dtype, int weight_dtype, const void* x, int rows, int64_t ldx, int64_t k, const void* packed,
                  int64_t n, const float* bias, void* y, int64_t ldy, int64_t panel_step, int64_t prefetch, int threads);
}

namespace {

enum { kFloat32, kBFloat16, kInt8, kGrouped, kDecoded };
enum { kWholeCodes, kRealCodes, kFloat8Codes };  // of grouped.h
constexpr int kRows = 40;

uint16_t to_bf16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t bits) {
  const uint32_t word = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// Uniform in [-1, 1).
float draw() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return float(int32_t(state >> 32)) / 2147483648.0f;
}

// Numbers of one dtype, and what they are.
struct Numbers {
  std::vector<char> bytes;
  std::vector<double> values;

  Numbers(int dtype, long count) : bytes(size_t(count) * (dtype == kFloat32 ? 4 : dtype == kBFloat16 ? 2 : 1)) {
    for (long i = 0; i < count; i++) {
      const float x = draw();
      const uint16_t half = to_bf16(x);
      const int8_t whole = int8_t(x * 127.0f);
      if (dtype == kFloat32) std::memcpy(&bytes[i * 4], &x, 4);
      if (dtype == kBFloat16) std::memcpy(&bytes[i * 2], &half, 2);
      if (dtype >= kInt8) std::memcpy(&bytes[i], &whole, 1);
      values.push_back(dtype == kFloat32 ? x : dtype == kBFloat16 ? from_bf16(half) : whole);
    }
  }
};

// e4m3: sign, 4 bits of an exponent that is 7 too large, 3 of a mantissa.
double float8(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const double size = exponent ? std::ldexp(8 + (code & 7), exponent - 10) : std::ldexp(code & 7, -9);
  return code & 0x80 ? -size : size;
}

// Codes of a grouped weight, 4 or 8 bits, with offsets where there are 4; the numbers they stand for replace the weight's.
// Returns the list of its panels, which lie behind it.
void* pack_grouped(int bits, long group, int kind, long k, long n, Numbers& weight) {
  const long groups = (k + group - 1) / group, panels = (n + tandem_panel() - 1) / tandem_panel();
  std::vector<float> scales(n * groups), offsets(n * groups), values(16);
  for (float& scale : scales) scale = draw() / (kind == kFloat8Codes ? 512 : kind == kRealCodes ? 1 : 128);
  for (float& offset : offsets) offset = draw();
  for (float& value : values) value = draw();
  int8_t table[16];
  for (int8_t& entry : table) entry = int8_t(draw() * 127.0f);
  std::vector<uint8_t> nibbles(n * ((k + 1) / 2));
  for (long i = 0; i < n; i++)
    for (long j = 0; j < k; j++) {
      char& byte = weight.bytes[i * k + j];
      if (kind == kFloat8Codes && (byte & 127) == 127) byte ^= 1;  // no number
      const int code = byte & 15;
      nibbles[i * ((k + 1) / 2) + j / 2] |= uint8_t(code << j % 2 * 4);
      double& value = weight.values[i * k + j];
      if (kind == kFloat8Codes) value = float8(uint8_t(byte));
      if (bits == 4) value = kind == kRealCodes ? double(values[code]) : table[code];
      const long at = i * groups + j / group;
      value = scales[at] * value - (bits == 4 ? offsets[at] : 0.0);
    }
  const void* codes = bits == 4 ? static_cast<const void*>(nibbles.data()) : weight.bytes.data();
  const GroupedSource source{codes, bits == 4 && kind == kWholeCodes ? table : nullptr,
                             kind == kRealCodes ? values.data() : nullptr, scales.data(),
                             bits == 4 ? offsets.data() : nullptr, nullptr, n, k, group, bits, kind};
  const long size = tandem_grouped_panel_bytes(&source), list = (panels * 8 + 63) / 64 * 64;
  char* packed = static_cast<char*>(tandem_alloc(list + panels * size));
  tandem_pack_grouped(&source, packed + list, size, reinterpret_cast<const uint8_t**>(packed), 0, 1, 2);
  return packed;
}

// `bits`, `group`, `kind`: of grouped weights.
bool check(int dtype, int weight_dtype, int bits, long group, int kind, long k, long n) {
  const int item = dtype == kFloat32 ? 4 : 2;
  const Numbers x(dtype, kRows * k);
  Numbers weight(weight_dtype, n * k);
  const std::vector<float> scales(n, 1.0f / 128);
  const long panels = (n + tandem_panel() - 1) / tandem_panel();
  void* packed;
  if (weight_dtype >= kGrouped) {
    packed = pack_grouped(bits, group, kind, k, n, weight);
  } else {
    packed = tandem_alloc(tandem_packed_bytes(weight_dtype, panels, k));
    tandem_pack(weight_dtype, weight.bytes.data(), weight_dtype == kInt8 ? scales.data() : nullptr, n, k, k, packed, 0, 1, 2);
  }
  auto multiply = [&](int first, int rows, long prefetch, int threads) {
    std::vector<char> y(size_t(rows) * n * item);
    if (tandem_linear(dtype, weight_dtype, &x.bytes[first * k * item], rows, k, k, packed, n, nullptr, y.data(), n, 1,
                      prefetch, threads))
      y.clear();
    return y;
  };
  std::vector<char> alone;
  for (int r = 0; r < kRows; r++) {
    const std::vector<char> y = multiply(r, 1, 0, 1);
    alone.insert(alone.end(), y.begin(), y.end());
  }
  bool good = true;
  for (long prefetch : {0, 4096, 16384})
    for (int threads : {1, 2, 3})
      for (int rows : {1, 2, 3, 5, 6, 7, 8, 9, 17, 40}) {
        const std::vector<char> y = multiply(kRows - rows, rows, prefetch, threads);
        const char* wanted = &alone[size_t(kRows - rows) * n * item];
        if (y.size() == size_t(rows) * n * item && !std::memcmp(y.data(), wanted, y.size())) continue;
        std::printf("dtypes %d, %d, %ld -> %ld: other bits at %d rows, prefetch %ld, %d threads\n", dtype, weight_dtype, k, n,
                    rows, prefetch, threads);
        good = false;
      }
  double worst = 0.0;
  for (int r = 0; r < kRows; r++)
    for (long c = 0; c < n; c++) {
      double exact = 0.0;
      for (long i = 0; i < k; i++) exact += x.values[r * k + i] * weight.values[c * k + i];
      if (weight_dtype == kInt8) exact /= 128;
      const char* at = &alone[(r * n + c) * item];
      float found;
      uint16_t half;
      std::memcpy(&half, at, 2);
      dtype == kFloat32 ? void(std::memcpy(&found, at, 4)) : void(found = from_bf16(half));
      worst = std::fmax(worst, std::fabs(found - exact) / std::sqrt(double(k)));
    }
  // Of grouped weights activations are rounded to steps of 1 / 127.
  const double allowed = weight_dtype == kGrouped ? 0.03 : dtype == kBFloat16 ? 0x1p-7 : weight_dtype == kInt8 ? 1e-4 : 2e-6;
  if (worst > allowed) std::printf("dtypes %d, %d (%d bits), %ld -> %ld: off by %g\n", dtype, weight_dtype, bits, k, n, worst);
  tandem_free(packed);
  return good && worst <= allowed;
}

}  // namespace

int main() {
  const int kinds[][5] = {{kFloat32, kFloat32},
                          {kBFloat16, kBFloat16},
                          {kFloat32, kInt8},
                          {kBFloat16, kInt8},
                          {kFloat32, kGrouped, 8, 16},
                          {kFloat32, kGrouped, 8, 1 << 20},
                          {kBFloat16, kGrouped, 4, 64},
                          {kFloat32, kGrouped, 4, 32},
                          {kFloat32, kDecoded, 8, 32, kWholeCodes},
                          {kFloat32, kDecoded, 4, 64, kRealCodes},
                          {kBFloat16, kDecoded, 8, 128, kFloat8Codes},
                          {kFloat32, kDecoded, 8, 1 << 20, kFloat8Codes}};
  const long shapes[][2] = {{1, 1}, {7, 3}, {48, 97}, {513, 65}, {2049, 40}, {5000, 130}, {130, 3000}};
  int failed = 0;
  for (auto& kind : kinds)
    for (auto& shape : shapes) failed += !check(kind[0], kind[1], kind[2], kind[3], kind[4], shape[0], shape[1]);
  std::printf("panels of %d columns: %s\n", tandem_panel(), failed ? "wrong" : "right");
  return failed != 0;
}
