// Where the rows of a pass lie in the cache, written down from the sequences' block tables.
#pragma once

#include "attention.h"

namespace tandem {

// Memory for a plan of up to so many rows and sequences; layout.take() names it.
struct Layout {
  int64_t block_size, width;  // `width`: blocks of the longest sequence
  int64_t* positions;         // [rows]
  int64_t* slots;             // [rows]
  int32_t* row_starts;        // [sequences + 1]
  int32_t* tables;            // [sequences, width]

  // take(bytes) hands out aligned memory, or counts it and returns null.
  template <class Take>
  void take(Take&& take, int64_t rows, int64_t sequences) {
    positions = reinterpret_cast<int64_t*>(take(rows * 8));
    slots = reinterpret_cast<int64_t*>(take(rows * 8));
    row_starts = reinterpret_cast<int32_t*>(take((sequences + 1) * 4));
    tables = reinterpret_cast<int32_t*>(take(sequences * width * 4));
  }

  int64_t blocks_of(int64_t entries) const { return (entries + block_size - 1) / block_size; }

  // Rows `row` to row + count of a sequence, which stand behind `from` entries; without blocks, block 0 takes them.
  void place(int64_t sequence, const int32_t* blocks, int64_t from, int64_t count, int64_t row) {
    int32_t* table = tables + sequence * width;
    for (int64_t i = 0; i < width; i++) table[i] = blocks && i * block_size < from + count ? blocks[i] : 0;
    for (int64_t i = 0; i < count; i++) {
      positions[row + i] = from + i;
      slots[row + i] = table[(from + i) / block_size] * block_size + (from + i) % block_size;
    }
    row_starts[sequence] = int32_t(row);
  }

  Plan plan(int64_t num_sequences, int64_t num_rows) const {
    row_starts[num_sequences] = int32_t(num_rows);
    return {positions, slots, row_starts, tables, num_rows, num_sequences, width, block_size};
  }
};

}  // namespace tandem
