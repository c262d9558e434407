// Operands in float32: products on AVX-512's lanes, for CPUs without tiles and for runs that want float32.
//
// A left operand is a row of blocks as it is, and so is a panel of a right operand (K x N), from top to bottom:
//     [N / 32][K / 32][32 rows][32 columns]
// The same names as in `tiles.h`.
#pragma once
#include <cstring>

#include "numbers.h"

using Number = float;

inline bool granted() { return true; }  // nothing to ask for

struct Unit {  // nothing to set up
  Unit() {}
  ~Unit() {}
};

inline Vec exp(Vec x) { return exponential<7>(x); }

// ---- packing ----

inline void transpose_block(const float* from, size_t ld, float* to) {
  for (int x = 0; x < 32; x += 16)
    for (int y = 0; y < 32; y += 16) {
      Vec columns[16];
      transposed(from + x * ld + y, ld, columns);
      for (int i = 0; i < 16; i++) store(to + (y + i) * 32 + x, columns[i]);
    }
}

// A row of blocks (32 rows, `columns` wide) as 32 rows of a right operand's K: `out` is their place in the first panel.
inline void pack_right(const float* blocks, int columns, float* out, size_t panel_stride) {
  for (int c = 0; c < columns; c += 32) std::memcpy(out + c / 32 * panel_stride, blocks + c * 32, kBlock * sizeof(float));
}

// The same, transposed, as a left operand: its rows are the columns, its K the rows.
inline void pack_left_transposed(const float* blocks, int columns, float* out, size_t panel_stride) {
  for (int c = 0; c < columns; c += 32) transpose_block(blocks + c * 32, 32, out + c / 32 * panel_stride);
}

// The same, transposed, as one panel of a right operand: its columns are the rows, its K the columns.
inline void pack_right_transposed(const float* blocks, int columns, float* out) {
  for (int c = 0; c < columns; c += 32) transpose_block(blocks + c * 32, 32, out + c * 32);
}

// 32 rows of a weight (32 x k) as a stretch of both right operands: `forward`, a panel of that of x W^T, and `backward`, 32
// rows of K of that of dy W.
inline void pack_weight(const float* rows, int k, float* forward, float* backward, size_t panel_stride) {
  for (int c = 0; c < k; c += 32) {
    transpose_block(rows + c, k, forward + c * 32);
    for (int r = 0; r < 32; r++)
      std::memcpy(backward + c / 32 * panel_stride + r * 32, rows + r * static_cast<size_t>(k) + c, 32 * sizeof(float));
  }
}

// ---- products ----

// A block of 32 x 32 sums.
class Block {
 public:
  void zero() { std::memset(sums_, 0, sizeof sums_); }

  void load(const float* c, size_t ld) {
    for (int r = 0; r < 32; r++) std::memcpy(sums_ + 32 * r, c + r * ld, 32 * sizeof(float));
  }

  void store(float* c, size_t ld) const {
    for (int r = 0; r < 32; r++) std::memcpy(c + r * ld, sums_ + 32 * r, 32 * sizeof(float));
  }

  // Adds a row of blocks (32 x 32 steps) times a panel's stretch: some steps at a time, whose operands stay in the
  // nearest cache, and of these 8 rows at a time, whose sums stay in 16 registers.
  void add(const float* a, const float* panel, int steps) {
    constexpr int at_once = 4;
    for (int from = 0; from < steps; from += at_once)
      for (int row = 0; row < 32; row += 8) {
        Vec left[8], right[8];
        for (int r = 0; r < 8; r++) {
          left[r] = ::load(sums_ + 32 * (row + r));
          right[r] = ::load(sums_ + 32 * (row + r) + 16);
        }
        for (int s = from; s < from + at_once && s < steps; s++) {
          const float *x = a + kBlock * s + 32 * row, *w = panel + kBlock * s;
          for (int k = 0; k < 32; k++) {
            const Vec w0 = ::load(w + 32 * k), w1 = ::load(w + 32 * k + 16);
            for (int r = 0; r < 8; r++) {
              const Vec one = all(x[32 * r + k]);
              left[r] = _mm512_fmadd_ps(one, w0, left[r]);
              right[r] = _mm512_fmadd_ps(one, w1, right[r]);
            }
          }
        }
        for (int r = 0; r < 8; r++) {
          ::store(sums_ + 32 * (row + r), left[r]);
          ::store(sums_ + 32 * (row + r) + 16, right[r]);
        }
      }
  }

 private:
  alignas(64) float sums_[kBlock];
};
