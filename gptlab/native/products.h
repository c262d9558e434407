// Matrix products of either kind of operands: bfloat16 on tiles, or with GPTLAB_FLOAT32 float32 on lanes.
#pragma once
#ifdef GPTLAB_FLOAT32
#include "lanes.h"
#else
#include "tiles.h"
#endif

// a (rows x k, blocks) times a packed right operand (k x n); finish(row, column, block) gets each block of 32 x 32.
template <class Finish>
void product(const Number* a, int rows, const Number* panels, int k, int n, Finish finish) {
  alignas(64) float sums[kBlock];
  Block block;
  for (int column = 0; column < n; column += kSide)
    for (int row = 0; row < rows; row += kSide) {
      block.zero();
      block.add(a + static_cast<size_t>(row) * k, panels + static_cast<size_t>(column) * k, k / 32);
      block.store(sums, kSide);
      finish(row, column, sums);
    }
}
