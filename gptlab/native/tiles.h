// Operands in bfloat16: products on Intel's AMX tiles with sums in float32, and the layouts that they want.
//
// A tile is 16 rows of 64 bytes. `tdpbf16ps` adds A B to C for A (16 x 32), B (32 x 16), C (16 x 16), where B holds pairs
// of rows side by side: row r is b[2r][0], b[2r+1][0], b[2r][1], ... (Intel 64 and IA-32 Architectures Optimization
// Reference Manual, chapter 20).
//
// A left operand is a row of blocks as it is, two tiles a block. A right operand (K x N) is packed in panels of 32
// columns, each a sequence over K of two tiles:
//     [N / 32][K / 32][2][16 pairs of rows][16 columns][2]
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "numbers.h"

using Number = uint16_t;

constexpr size_t kTile = 512;  // numbers in a tile

// Asks the system for the tiles (Linux: Documentation/arch/x86/xstate.rst).
inline bool granted() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// While one lives, all eight tiles are 16 x 64 bytes. Released after, for others configure theirs.
struct Unit {
  Unit() {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;
    for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Unit() { _tile_release(); }
};

// ---- numbers ----

inline Vec exp(Vec x) { return exponential<5>(x); }
inline Vec widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
inline __m256i narrow(Vec v) { return (__m256i)_mm512_cvtneps_pbh(v); }
inline Vec load(const Number* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// Returns what is stored, rounded.
inline Vec store(Number* p, Vec v) {
  const __m256i rounded = narrow(v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded);
  return widen(rounded);
}

// ---- packing ----

// Two rows of 16 side by side: the low halves are `even`'s.
inline __m512i pair(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// Half a block (32 rows, 16 columns at `p`) as a tile of a right operand: pairs of rows side by side.
inline void pairs_of_rows(const Number* p, __m512i r[16]) {
  for (int i = 0; i < 16; i++)
    r[i] = pair(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i + 32)));
}

inline void put(Number* out, const __m512i r[16]) {
  for (int i = 0; i < 16; i++) _mm512_store_si512(out + 32 * i, r[i]);
}

// A row of blocks (32 rows, `columns` wide) as 32 rows of a right operand's K: `out` is their place in the first panel.
inline void pack_right(const Number* blocks, int columns, Number* out, size_t panel_stride) {
  for (int c = 0; c < columns; c += 16) {
    __m512i r[16];
    pairs_of_rows(blocks + c / 32 * kBlock + c % 32, r);
    put(out + c / 32 * panel_stride + c % 32 / 16 * kTile, r);
  }
}

// The same, transposed, as a left operand: its rows are the columns, its K the rows.
inline void pack_left_transposed(const Number* blocks, int columns, Number* out, size_t panel_stride) {
  for (int c = 0; c < columns; c += 16) {
    __m512i r[16];
    pairs_of_rows(blocks + c / 32 * kBlock + c % 32, r);
    transpose(r);
    put(out + c / 32 * panel_stride + c % 32 / 16 * kTile, r);
  }
}

// The same, transposed, as one panel of a right operand: its columns are the rows, its K the columns.
inline void pack_right_transposed(const Number* blocks, int columns, Number* out) {
  for (int c = 0; c < columns; c += 32)
    for (int half = 0; half < 2; half++) {
      __m512i r[16];
      for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(blocks + c * 32 + (16 * half + i) * 32);
      transpose(r);
      put(out + c * 32 + half * kTile, r);
    }
}

// 32 rows of a weight (32 x k) as a stretch of both right operands: `forward`, a panel of that of x W^T, and `backward`, 32
// rows of K of that of dy W.
inline void pack_weight(const float* rows, int k, Number* forward, Number* backward, size_t panel_stride) {
  for (int c = 0; c < k; c += 32)
    for (int half = 0; half < 2; half++) {
      __m512i r[16];
      for (int i = 0; i < 16; i++) {
        const float* p = rows + (16 * half + i) * static_cast<size_t>(k) + c;
        r[i] = (__m512i)_mm512_cvtne2ps_pbh(load(p + 16), load(p));
      }
      transpose(r);
      put(forward + c * 32 + half * kTile, r);
      for (int i = 0; i < 16; i++) {
        const float* p = rows + 2 * i * static_cast<size_t>(k) + c + 16 * half;
        r[i] = pair(narrow(load(p)), narrow(load(p + k)));
      }
      put(backward + c / 32 * panel_stride + half * kTile, r);
    }
}

// ---- products ----

// A block of 32 x 32 sums, in tiles 0 to 3: there is one at a time.
struct Block {
  void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  void load(const float* c, size_t ld) {
    asm volatile("" ::: "memory");
    _tile_loadd(0, c, 4 * ld);
    _tile_loadd(1, c + 16, 4 * ld);
    _tile_loadd(2, c + 16 * ld, 4 * ld);
    _tile_loadd(3, c + 16 * ld + 16, 4 * ld);
  }

  void store(float* c, size_t ld) const {
    _tile_stored(0, c, 4 * ld);
    _tile_stored(1, c + 16, 4 * ld);
    _tile_stored(2, c + 16 * ld, 4 * ld);
    _tile_stored(3, c + 16 * ld + 16, 4 * ld);
    asm volatile("" ::: "memory");
  }

  // Adds a row of blocks (32 x 32 steps) times a panel's stretch.
  void add(const Number* a, const Number* panel, int steps) {
    asm volatile("" ::: "memory");
    for (int s = 0; s < steps; s++) {
      _tile_loadd(4, a + kBlock * s, 64);
      _tile_loadd(6, panel + kBlock * s, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, panel + kBlock * s + kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + kBlock * s + kTile, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};
