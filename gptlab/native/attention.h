// Causal attention of one head of one sequence, forward and backward, without the T x T scores in memory
// (Dao et al. 2022, "FlashAttention"; here a strip of scores stays in the cache).
//
// q, k, v and the output are blocks (`tiles.h`) of matrices that are wider: 32 rows on is `width * 32` numbers on. T and D
// are multiples of 32. Each function works in a scratch of its thread.
#pragma once
#include <cstring>

#include "products.h"

struct Head {
  int T, D;
  size_t width;      // of the matrix that q, k, v are part of: 3 C
  size_t width_out;  // of the output's: C
  float scale;       // 1 / sqrt(D)
};

constexpr int kWide = 128;  // queries that the backward pass takes at once

inline size_t attention_forward_scratch(int T, int D) {  // bytes
  return (2ul * T * D + kSide * T) * sizeof(Number) + 4ul * kSide * (T + 16) + 64;
}

inline size_t attention_backward_scratch(int T, int D) {
  return (5ul * T * D + (T + 2ul * kSide) * kWide) * sizeof(Number) + 2ul * T * D * 4 + 4ul * T + 64;
}

// out = softmax(q k^T scale) v; lse (T): the log of the sum of the exponentials, for the backward pass.
inline void attention_forward(const Head& h, const Number* q, const Number* k, const Number* v, Number* out, float* lse,
                              char* scratch) {
  const int T = h.T, D = h.D, steps = D / 32;
  Number* keys = reinterpret_cast<Number*>(scratch);  // k^T as a right operand: panels of 32 keys
  Number* values = keys + static_cast<size_t>(T) * D;  // v as a right operand: panels of 32 features
  float* scores = reinterpret_cast<float*>(values + static_cast<size_t>(T) * D);  // 32 rows of T
  const size_t ld = T + 16;  // rows a power of two apart would share their places in the cache
  Number* weights = reinterpret_cast<Number*>(scores + kSide * ld);  // blocks (32, T)
  const size_t panel = static_cast<size_t>(T) * 32;
  Block block;
  for (int t = 0; t < T; t += 32) {
    pack_right_transposed(k + t * h.width, D, keys + static_cast<size_t>(t) * D);
    pack_right(v + t * h.width, D, values + t / 32 * kBlock, panel);
  }
  for (int i = 0; i < T; i += 32) {  // 32 queries
    const int n = i + 32;            // and the keys that the last of them sees
    for (int j = 0; j < n; j += 32) {
      block.zero();
      block.add(q + i * h.width, keys + static_cast<size_t>(j) * D, steps);
      block.store(scores + j, ld);
    }
    float inverse[32];
    for (int r = 0; r < 32; r++) {
      float* s = scores + r * ld;
      Number* w = weights + r * 32;
      const int seen = i + r + 1;
      for (int j = i; j < n; j += 16) {  // the future: -1e30, whose exponential is 0
        const int here = seen - j;
        const __mmask16 past = here >= 16 ? 0xffff : here <= 0 ? 0 : (1u << here) - 1;
        store(s + j, _mm512_mask_blend_ps(past, all(-1e30f), load(s + j)));
      }
      Vec top = load(s);
      for (int j = 16; j < n; j += 16) top = _mm512_max_ps(top, load(s + j));
      const float high = _mm512_reduce_max_ps(top) * h.scale;
      Vec total = all(0.f);
      for (int j = 0; j < n; j += 16) {
        Vec e = exp(_mm512_fmsub_ps(load(s + j), all(h.scale), all(high)));
        if (j >= i) {
          const int here = seen - j;
          e = _mm512_maskz_mov_ps(here >= 16 ? 0xffff : here <= 0 ? 0 : (1u << here) - 1, e);
        }
        total = _mm512_add_ps(total, e);
        store(w + j / 32 * kBlock + j % 32, e);
      }
      const float t = sum(total);
      inverse[r] = 1.f / t;
      lse[i + r] = high + std::log(t);
    }
    for (int d = 0; d < D; d += 32) {
      alignas(64) float sums[kBlock];
      block.zero();
      block.add(weights, values + d / 32 * panel, n / 32);
      block.store(sums, kSide);
      for (int r = 0; r < 32; r++)
        for (int c = 0; c < 32; c += 16)
          store(out + i * h.width_out + d * 32 + r * 32 + c, _mm512_mul_ps(load(sums + 32 * r + c), all(inverse[r])));
    }
  }
}

// The gradients of q, k, v from that of the output.
//
// Everything is computed transposed, keys down and queries across, so that the weights and their gradients come out as
// the products want them: P^T and dS^T as left operands of dV = P^T dO and dK = dS^T Q, and dS^T as the right operand of
// dQ^T = K^T dS^T.
inline void attention_backward(const Head& h, const Number* q, const Number* k, const Number* v, const Number* out,
                               const Number* dout, const float* lse, Number* dq, Number* dk, Number* dv, char* scratch) {
  const int T = h.T, D = h.D, steps = D / 32;
  const size_t size = static_cast<size_t>(T) * D, panel = static_cast<size_t>(T) * 32;
  float* sum_k = reinterpret_cast<float*>(scratch);  // (T, D), blocks
  float* sum_v = sum_k + size;                       // (T, D), blocks
  Number* queries_t = reinterpret_cast<Number*>(sum_v + size);  // q^T as a right operand: panels of 32 queries
  Number* douts_t = queries_t + size;                         // dO^T likewise
  Number* queries = douts_t + size;                           // q as a right operand: panels of 32 features
  Number* douts = queries + size;                             // dO likewise
  Number* keys_t = douts + size;                              // k^T as a left operand: panels of 32 features
  Number* strip = keys_t + size;                              // dS^T as a right operand: 4 panels of 32 queries
  Number* weights = strip + static_cast<size_t>(T) * kWide;   // P^T (32, kWide), blocks
  Number* slopes = weights + kSide * kWide;                   // dS^T (32, kWide), blocks
  float* delta = reinterpret_cast<float*>(slopes + kSide * kWide);  // (T): sum of dO O over the features
  for (int t = 0; t < T; t += 32) {
    const Number *dout_t = dout + t * h.width_out, *out_t = out + t * h.width_out;
    pack_right_transposed(q + t * h.width, D, queries_t + static_cast<size_t>(t) * D);
    pack_right_transposed(dout_t, D, douts_t + static_cast<size_t>(t) * D);
    pack_right(q + t * h.width, D, queries + t / 32 * kBlock, panel);
    pack_right(dout_t, D, douts + t / 32 * kBlock, panel);
    pack_left_transposed(k + t * h.width, D, keys_t + t / 32 * kBlock, panel);
    for (int r = 0; r < 32; r++) {
      Vec s = all(0.f);
      for (int d = 0; d < D; d += 16) {
        const size_t at = d / 32 * kBlock + r * 32 + d % 32;
        s = _mm512_fmadd_ps(load(out_t + at), load(dout_t + at), s);
      }
      delta[t + r] = sum(s);
    }
  }
  for (size_t i = 0; i < 2 * size; i += 16) store(sum_k + i, all(0.f));
  alignas(64) float scores[kBlock], rises[kBlock];
  Block block;
  const Vec scale = all(h.scale);
  for (int i = 0; i < T; i += kWide) {
    const int wide = T - i < kWide ? T - i : kWide, n = i + wide;
    for (int j = 0; j < n; j += 32) {                  // 32 keys
      const int first = j > i ? (j - i) / 32 * 32 : 0;  // queries before it see none of them
      for (int c = 0; c < wide; c += 32) {
        Number* right = strip + c / 32 * panel + j / 32 * kBlock;
        if (c < first) {
          std::memset(right, 0, kBlock * sizeof(Number));
          continue;
        }
        block.zero();
        block.add(k + j * h.width, queries_t + static_cast<size_t>(i + c) * D, steps);
        block.store(scores, kSide);
        block.zero();
        block.add(v + j * h.width, douts_t + static_cast<size_t>(i + c) * D, steps);
        block.store(rises, kSide);
        for (int half = 0; half < 32; half += 16) {
          const int column = i + c + half;  // 16 queries
          const Vec l = load(lse + column), d = load(delta + column);
          for (int r = 0; r < 32; r++) {
            const int at = r * kSide + half;
            const int hidden = j + r - column;  // how many of these queries come before the key
            const __mmask16 past = hidden <= 0 ? 0xffff : hidden >= 16 ? 0 : 0xffff << hidden;
            const Vec p = _mm512_maskz_mov_ps(past, exp(_mm512_fmsub_ps(load(scores + at), scale, l)));
            const Vec s = _mm512_mul_ps(_mm512_mul_ps(p, scale), _mm512_sub_ps(load(rises + at), d));
            store(weights + c * 32 + at, p);
            store(slopes + c * 32 + at, s);
          }
        }
        pack_right(slopes + c * 32, 32, right, 0);
      }
      for (int d = 0; d < D; d += 32) {
        const size_t at = d / 32 * panel + (i + first) / 32 * kBlock;
        float *block_v = sum_v + static_cast<size_t>(j) * D + d * 32, *block_k = sum_k + static_cast<size_t>(j) * D + d * 32;
        block.load(block_v, 32);
        block.add(weights + first * 32, douts + at, (wide - first) / 32);
        block.store(block_v, 32);
        block.load(block_k, 32);
        block.add(slopes + first * 32, queries + at, (wide - first) / 32);
        block.store(block_k, 32);
      }
    }
    for (int c = 0; c < wide; c += 32)
      for (int d = 0; d < D; d += 32) {
        block.zero();
        block.add(keys_t + d / 32 * panel, strip + c / 32 * panel, n / 32);
        block.store(scores, kSide);  // (32 features, 32 queries)
        for (int x = 0; x < 32; x += 16)
          for (int y = 0; y < 32; y += 16) {
            Vec columns[16];
            transposed(scores + x * kSide + y, kSide, columns);
            for (int z = 0; z < 16; z++) store(dq + (i + c) * h.width + d * 32 + (y + z) * 32 + x, columns[z]);
          }
      }
  }
  for (int t = 0; t < T; t += 32)
    for (int i = 0; i < 32 * D; i += 16) {
      store(dk + t * h.width + i, load(sum_k + static_cast<size_t>(t) * D + i));
      store(dv + t * h.width + i, load(sum_v + static_cast<size_t>(t) * D + i));
    }
}
