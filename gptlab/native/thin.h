// A few rows times a weight as torch has it (N outputs, K inputs), for decoding: y = x W^T + bias, and GELU or a residual.
//
// So few rows stay in the cache while the weight is read once, from top to bottom, at the memory's rate. Numbers are
// float32 or bfloat16, or weights are int8 with a scale an output; sums are float32. An output is summed by one thread, in
// an order that neither the number of threads nor that of rows changes.
#pragma once
#include <algorithm>
#include <vector>

#include "pool.h"
#include "rows.h"

constexpr int kThinRows = 8;  // rows of x whose sums are in registers at once

inline Vec load16(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline Vec load16(const uint16_t* p, __mmask16 m) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
inline Vec load16(const int8_t* p, __mmask16 m) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m, p)));
}
inline float number(float x) { return x; }
inline float number(uint16_t x) {
  union { uint32_t bits; float value; } u = {static_cast<uint32_t>(x) << 16};
  return u.value;
}
inline void put_number(float* p, float x) { *p = x; }
inline void put_number(uint16_t* p, float x) {  // to nearest, ties to even
  union { float value; uint32_t bits; } u = {x};
  *p = static_cast<uint16_t>((u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16);
}

// Sums of R outputs for M rows: out[r * kThinRows + m].
template <int M, int R, class Weight>
inline void thin_sums(const Weight* w, size_t K, const float* x, float* out) {
  Vec sums[R][M];
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) sums[r][m] = all(0.f);
  for (size_t k = 0; k < K; k += 16) {
    const __mmask16 mask = K - k >= 16 ? 0xffff : (1u << (K - k)) - 1;
    Vec row[M];
    for (int m = 0; m < M; m++) row[m] = load16(x + m * K + k, mask);
    for (int r = 0; r < R; r++) {
      const Vec weight = load16(w + r * K + k, mask);
      _mm_prefetch(reinterpret_cast<const char*>(w + (R + r) * K + k), _MM_HINT_T0);  // of the next outputs
      for (int m = 0; m < M; m++) sums[r][m] = _mm512_fmadd_ps(weight, row[m], sums[r][m]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) out[r * kThinRows + m] = sum(sums[r][m]);
}

template <class Weight, class Type>
struct Thin {
  const Weight* w;
  const float* scale;    // of each output, may be absent
  const Type* bias;      // may be absent
  const Type* residual;  // (M, N), may be absent
  Type* y;
  size_t N, K, M;
  bool gelu;

  template <int rows>
  void outputs(size_t n, size_t from, const float* x) const {
    constexpr int R = rows <= 2 ? 8 : rows <= 4 ? 4 : 2;
    alignas(64) float sums[8 * kThinRows];
    for (size_t at = n; at < std::min(n + 8, N); at += R) {
      if (at + R <= N) thin_sums<rows, R>(w + at * K, K, x + from * K, sums);
      else
        for (size_t r = 0; at + r < N; r++) thin_sums<rows, 1>(w + (at + r) * K, K, x + from * K, sums + r * kThinRows);
      for (size_t r = 0; r < R && at + r < N; r++)
        for (size_t m = 0; m < rows; m++) {
          const size_t place = (from + m) * N + at + r;
          float value = sums[r * kThinRows + m];
          if (scale) value *= scale[at + r];
          if (bias) value += number(bias[at + r]);
          if (gelu) value = _mm512_cvtss_f32(::gelu(all(value)));
          if (residual) value += number(residual[place]);
          put_number(y + place, value);
        }
    }
  }

  void run(Pool& pool, const Type* rows) const {
    std::vector<float> x(M * K);
    for (size_t i = 0; i < M * K; i++) x[i] = number(rows[i]);
    const size_t chunk = std::max<size_t>(8, 65536 / sizeof(Weight) / K / 8 * 8);  // outputs, 64 kB of weights
    pool.run(static_cast<int>((N + chunk - 1) / chunk), [&](int task, int) {
      for (size_t n = task * chunk; n < std::min(N, (task + 1) * chunk); n += 8)
        for (size_t from = 0; from < M; from += kThinRows) switch (std::min<size_t>(kThinRows, M - from)) {
            case 1: outputs<1>(n, from, x.data()); break;
            case 2: outputs<2>(n, from, x.data()); break;
            case 3: outputs<3>(n, from, x.data()); break;
            case 4: outputs<4>(n, from, x.data()); break;
            case 5: outputs<5>(n, from, x.data()); break;
            case 6: outputs<6>(n, from, x.data()); break;
            case 7: outputs<7>(n, from, x.data()); break;
            default: outputs<8>(n, from, x.data());
          }
    });
  }
};
