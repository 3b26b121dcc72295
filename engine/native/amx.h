// Products of grouped weights of whole numbers on the tile registers of AMX (Intel, from Sapphire Rapids on).
//
// Sums of a chain are whole numbers, exact in 32 bits, and what follows is done in the order of grouped.cpp: bits are those
// of its kernel. So each panel says from how many rows on AMX multiplies it (GroupedHeader::amx_rows), and a row may meet
// both. engine/native/amx.py compares and measures at load.
//
// bfloat16 stays with AVX-512: TDPBF16PS adds products in another order than VDPBF16PS, so all numbers of rows would need
// it, and one row is what most passes have.
#pragma once

#include "grouped.h"

#if defined(__AVX512VNNI__) && defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define TANDEM_AMX 1
#endif

namespace tandem {

#if defined(TANDEM_AMX)
// sums[rows][kPanel] += a[.., from..to) · the same inputs, kDepth at most, of one panel. `OneGroup`: the columns' scales are
// left out. The thread's tile registers stay configured until release_amx().
template <bool OneGroup>
void amx_product(int rows, const int8_t* a, long lda, Grouped::Panel panel, long from, long to, float* sums);

// A pass is over for this thread: its tile registers are given up, else the kernel saves them at every switch and the core
// cannot sleep deeply.
void release_amx();
#else
inline void release_amx() {}
#endif

}  // namespace tandem
