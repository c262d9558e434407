// Vectors of 16 floats, and what both kinds of operands (`tiles.h`, `lanes.h`) build on.
//
// A matrix (rows x columns) of activations lies in blocks of 32 x 32, each in one piece, so that products, sums and
// epilogues run through memory in order: [rows / 32][columns / 32][32][32]. The block of row r and column c (multiples of
// 32) begins at r * columns + c * 32.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

using Vec = __m512;

constexpr int kSide = 32;         // rows and columns of a block
constexpr size_t kBlock = 1024;  // numbers in it

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
// Returns what is stored.
inline Vec store(float* p, Vec v) {
  _mm512_storeu_ps(p, v);
  return v;
}
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }

// e^x as 2^n times Taylor's polynomial of 2^r on [-1/2, 1/2]: relative error 3e-6 with 5 terms, 2e-8 with 7; next to
// nothing below -87.
template <int terms>
inline Vec exponential(Vec x) {
  const Vec y = _mm512_mul_ps(_mm512_max_ps(x, all(-126.f)), all(1.44269504f));
  const Vec n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = _mm512_sub_ps(y, n);
  constexpr float c[] = {1.f,           6.93147182e-1f, 2.40226507e-1f, 5.55041087e-2f,
                         9.61812911e-3f, 1.33335581e-3f, 1.54035304e-4f, 1.52527338e-5f};  // ln(2)^i / i!
  Vec p = all(c[terms]);
  for (int i = terms - 1; i >= 0; i--) p = _mm512_fmadd_ps(p, r, all(c[i]));
  return _mm512_scalef_ps(p, n);
}

inline Vec reciprocal(Vec x) {  // one step of Newton after 14 bits
  const Vec r = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(r, _mm512_fnmadd_ps(x, r, all(2.f)));
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

// The 16 x 16 floats at `p`, whose rows are `ld` apart, transposed: 16 columns as vectors.
inline void transposed(const float* p, size_t ld, Vec columns[16]) {
  __m512i r[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_castps_si512(load(p + i * ld));
  transpose(r);
  for (int i = 0; i < 16; i++) columns[i] = _mm512_castsi512_ps(r[i]);
}
