// What happens to the rows between the products: LayerNorm, GELU, and sums over columns.
#pragma once
#include "products.h"

constexpr float kEpsilon = 1e-5f;  // as torch's LayerNorm

// All of these take 32 rows of C numbers, in blocks.

// Each row's sum of the 16 partial ones in `lanes` (32 x 16), times `factor`.
inline void reduce(const float* lanes, float factor, float* out) {
  for (int r = 0; r < 32; r++) out[r] = _mm512_reduce_add_ps(load(lanes + 16 * r)) * factor;
}

// y = xhat gain + bias with xhat = (x - mean) / deviation (Ba et al. 2016). Keeps xhat and 1 / deviation.
inline void normalise(const float* x, const float* gain, const float* bias, int C, Number* xhat, float* inverse, Number* y) {
  alignas(64) float lanes[512] = {};
  float mean[32];
  for (int c = 0; c < C; c += 32)
    for (int r = 0; r < 32; r++) {
      const float* p = x + 32 * (c + r);
      store(lanes + 16 * r, _mm512_add_ps(load(lanes + 16 * r), _mm512_add_ps(load(p), load(p + 16))));
    }
  reduce(lanes, 1.f / C, mean);
  for (float& lane : lanes) lane = 0.f;
  for (int c = 0; c < C; c += 32)
    for (int r = 0; r < 32; r++) {
      const float* p = x + 32 * (c + r);
      const Vec a = _mm512_sub_ps(load(p), all(mean[r])), b = _mm512_sub_ps(load(p + 16), all(mean[r]));
      store(lanes + 16 * r, _mm512_fmadd_ps(a, a, _mm512_fmadd_ps(b, b, load(lanes + 16 * r))));
    }
  reduce(lanes, 1.f / C, inverse);
  for (int r = 0; r < 32; r++) inverse[r] = 1.f / std::sqrt(inverse[r] + kEpsilon);
  for (int c = 0; c < C; c += 16) {
    const Vec g = load(gain + c), b = bias ? load(bias + c) : all(0.f);
    for (int r = 0; r < 32; r++) {
      const size_t at = c / 32 * kBlock + r * 32 + c % 32;
      const Vec h = _mm512_mul_ps(_mm512_sub_ps(load(x + at), all(mean[r])), all(inverse[r]));
      store(xhat + at, h);
      store(y + at, _mm512_fmadd_ps(h, g, b));
    }
  }
}

// y anew from what was kept.
inline void renormalise(const Number* xhat, const float* gain, const float* bias, int C, Number* y) {
  for (int c = 0; c < C; c += 16) {
    const Vec g = load(gain + c), b = bias ? load(bias + c) : all(0.f);
    for (int r = 0; r < 32; r++) {
      const size_t at = c / 32 * kBlock + r * 32 + c % 32;
      store(y + at, _mm512_fmadd_ps(load(xhat + at), g, b));
    }
  }
}

// Adds the gradient of x, given that of y, to dx; and to the sums of the gain's and the bias's gradients.
inline void normalise_backward(const float* dy, const Number* xhat, const float* inverse, const float* gain, int C,
                               float* dx, float* dgain, float* dbias) {
  alignas(64) float lanes[1024] = {};
  float mean[32], slope[32];
  for (int c = 0; c < C; c += 16) {
    const Vec g = load(gain + c);
    Vec sum_gain = load(dgain + c), sum_bias = load(dbias + c);
    for (int r = 0; r < 32; r++) {
      const size_t at = c / 32 * kBlock + r * 32 + c % 32;
      const Vec h = load(xhat + at), d = load(dy + at), scaled = _mm512_mul_ps(d, g);
      sum_gain = _mm512_fmadd_ps(d, h, sum_gain);
      sum_bias = _mm512_add_ps(sum_bias, d);
      store(lanes + 16 * r, _mm512_add_ps(load(lanes + 16 * r), scaled));
      store(lanes + 512 + 16 * r, _mm512_fmadd_ps(scaled, h, load(lanes + 512 + 16 * r)));
    }
    store(dgain + c, sum_gain);
    store(dbias + c, sum_bias);
  }
  reduce(lanes, 1.f / C, mean);
  reduce(lanes + 512, 1.f / C, slope);
  for (int c = 0; c < C; c += 16) {
    const Vec g = load(gain + c);
    for (int r = 0; r < 32; r++) {
      const size_t at = c / 32 * kBlock + r * 32 + c % 32;
      const Vec scaled = _mm512_fmsub_ps(load(dy + at), g, all(mean[r]));
      const Vec d = _mm512_fnmadd_ps(load(xhat + at), all(slope[r]), scaled);
      store(dx + at, _mm512_fmadd_ps(d, all(inverse[r]), load(dx + at)));
    }
  }
}

constexpr float kGelu = 0.7978845608f, kCube = 0.044715f;  // sqrt(2 / pi) (Hendrycks & Gimpel 2016)

// 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3): GELU's tanh form is x times it.
inline Vec gelu_share(Vec x) {
  const Vec inner = _mm512_fmadd_ps(_mm512_mul_ps(all(kCube), x), _mm512_mul_ps(x, x), x);
  const Vec e = exp(_mm512_min_ps(_mm512_mul_ps(inner, all(-2.f * kGelu)), all(80.f)));
  return reciprocal(_mm512_add_ps(e, all(1.f)));
}

inline Vec gelu(Vec x) { return _mm512_mul_ps(x, gelu_share(x)); }

// GELU and its slope: s + x s (1 - s) 2 u'.
inline Vec gelu(Vec x, Vec* slope) {
  const Vec s = gelu_share(x), value = _mm512_mul_ps(x, s);
  const Vec rise = _mm512_fmadd_ps(all(6.f * kGelu * kCube), _mm512_mul_ps(x, x), all(2.f * kGelu));
  *slope = _mm512_fmadd_ps(_mm512_mul_ps(value, _mm512_sub_ps(all(1.f), s)), rise, s);
  return value;
}
