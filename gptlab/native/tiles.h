// Matrix products on Intel's AMX tiles, bfloat16 in and float32 out, and the layouts that they want.
//
// A tile is 16 rows of 64 bytes. `tdpbf16ps` adds A B to C for A (16 x 32), B (32 x 16), C (16 x 16), where B holds pairs
// of rows side by side: row r is b[2r][0], b[2r+1][0], b[2r][1], ... (Intel 64 and IA-32 Architectures Optimization
// Reference Manual, chapter 20).
//
// A right operand (K x N) is packed in panels of 32 columns, each a sequence over K of two such tiles:
//     [N / 32][K / 32][2][16 pairs of rows][16 columns][2]
//
// A matrix (rows x columns) of activations lies in blocks of 32 x 32, each in one piece, so that products, sums and
// epilogues run through memory in order: [rows / 32][columns / 32][32][32]. That is a left operand as it is, as two tiles
// a block; and the block of row r and column c (multiples of 32) begins at r * columns + c * 32.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

using bf16 = uint16_t;
using Vec = __m512;

constexpr int kSide = 32;                         // rows and columns of a block of C: 2 x 2 tiles
constexpr size_t kTile = 512;                     // numbers in a tile
constexpr size_t kPair = 2 * kTile;               // two tiles: 32 x 32 numbers

// While one lives, all eight tiles are 16 x 64 bytes. Released after, for others configure theirs.
struct Tiles {
  Tiles() {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;
    for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { _tile_release(); }
};

// ---- numbers ----

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m256i narrow(Vec v) { return (__m256i)_mm512_cvtneps_pbh(v); }
inline void store(bf16* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
inline float wide(bf16 x) {
  union { uint32_t bits; float value; } u = {static_cast<uint32_t>(x) << 16};
  return u.value;
}

// e^x as 2^n times Taylor's polynomial of 2^r on [-1/2, 1/2]: relative error 3e-6; next to nothing below -87.
inline Vec exp(Vec x) {
  const Vec y = _mm512_mul_ps(_mm512_max_ps(x, all(-126.f)), all(1.44269504f));
  const Vec n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = _mm512_sub_ps(y, n);
  Vec p = all(1.33335581e-3f);
  p = _mm512_fmadd_ps(p, r, all(9.61812911e-3f));
  p = _mm512_fmadd_ps(p, r, all(5.55041087e-2f));
  p = _mm512_fmadd_ps(p, r, all(2.40226507e-1f));
  p = _mm512_fmadd_ps(p, r, all(6.93147182e-1f));
  p = _mm512_fmadd_ps(p, r, all(1.f));
  return _mm512_scalef_ps(p, n);
}

inline Vec reciprocal(Vec x) {  // one step of Newton after 14 bits
  const Vec r = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(r, _mm512_fnmadd_ps(x, r, all(2.f)));
}

// ---- packing ----

// Two rows of 16 side by side: the low halves are `even`'s.
inline __m512i pair(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// Transposes 16 x 16 words of 32 bits.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Half a block (32 rows, 16 columns at `p`) as a tile of a right operand: pairs of rows side by side.
inline void pairs_of_rows(const bf16* p, __m512i r[16]) {
  for (int i = 0; i < 16; i++)
    r[i] = pair(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i + 32)));
}

inline void put(bf16* out, const __m512i r[16]) {
  for (int i = 0; i < 16; i++) _mm512_store_si512(out + 32 * i, r[i]);
}

// A row of blocks (32 rows, `columns` wide) as 32 rows of a right operand's K: `out` is their place in the first panel.
inline void pack_right(const bf16* blocks, int columns, bf16* out, size_t panel_stride) {
  for (int c = 0; c < columns; c += 16) {
    __m512i r[16];
    pairs_of_rows(blocks + c / 32 * kPair + c % 32, r);
    put(out + c / 32 * panel_stride + c % 32 / 16 * kTile, r);
  }
}

// The same, transposed, as a left operand: its rows are the columns, its K the rows.
inline void pack_left_transposed(const bf16* blocks, int columns, bf16* out, size_t panel_stride) {
  for (int c = 0; c < columns; c += 16) {
    __m512i r[16];
    pairs_of_rows(blocks + c / 32 * kPair + c % 32, r);
    transpose(r);
    put(out + c / 32 * panel_stride + c % 32 / 16 * kTile, r);
  }
}

// The same, transposed, as one panel of a right operand: its columns are the rows, its K the columns.
inline void pack_right_transposed(const bf16* blocks, int columns, bf16* out) {
  for (int c = 0; c < columns; c += 32)
    for (int half = 0; half < 2; half++) {
      __m512i r[16];
      for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(blocks + c * 32 + (16 * half + i) * 32);
      transpose(r);
      put(out + c * 32 + half * kTile, r);
    }
}

// ---- products ----

inline void zero_block() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void load_block(const float* c, size_t ld) {
  asm volatile("" ::: "memory");
  _tile_loadd(0, c, 4 * ld);
  _tile_loadd(1, c + 16, 4 * ld);
  _tile_loadd(2, c + 16 * ld, 4 * ld);
  _tile_loadd(3, c + 16 * ld + 16, 4 * ld);
}

inline void store_block(float* c, size_t ld) {
  _tile_stored(0, c, 4 * ld);
  _tile_stored(1, c + 16, 4 * ld);
  _tile_stored(2, c + 16 * ld, 4 * ld);
  _tile_stored(3, c + 16 * ld + 16, 4 * ld);
  asm volatile("" ::: "memory");
}

// Adds a row of blocks (32 x 32 steps) times a panel's stretch to the block in tiles 0 to 3.
inline void add_product(const bf16* a, const bf16* panel, int steps) {
  asm volatile("" ::: "memory");
  for (int s = 0; s < steps; s++) {
    _tile_loadd(4, a + kPair * s, 64);
    _tile_loadd(6, panel + kPair * s, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kPair * s + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kPair * s + kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// a (rows x k, blocks) times a packed right operand (k x n); finish(row, column, block) gets each block of 32 x 32.
template <class Finish>
void product(const bf16* a, int rows, const bf16* panels, int k, int n, Finish finish) {
  alignas(64) float block[kSide * kSide];
  for (int column = 0; column < n; column += kSide)
    for (int row = 0; row < rows; row += kSide) {
      zero_block();
      add_product(a + static_cast<size_t>(row) * k, panels + static_cast<size_t>(column) * k, k / 32);
      store_block(block, kSide);
      finish(row, column, block);
    }
}
