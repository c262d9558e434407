// The forward pass: two phases a layer, attention and all the rest.
#pragma once
#include "state.h"

class Forward : public State {
 protected:
  using State::State;

  void forward(const int64_t* ids) {
    pool_.run(chunks(), [&](int task, int thread) {
      const int first = task * rows_, n = std::min(rows_, M - first);
      for (int r = first; r < first + n; r++) {
        const float *token = p_[kTokens] + ids[r] * C, *position = p_[kPositions] + size(r % T, C);
        for (int c = 0; c < C; c += 16)
          store(x_ + row_of(r) + c / 32 * kBlock + c % 32, _mm512_add_ps(load(token + c), load(position + c)));
      }
      const Unit unit;
      to_qkv(0, first, n, thread);
    });
    for (int l = 0; l < L; l++) {
      const Kept& k = kept_[l];
      pool_.run(static_cast<int>(s_.batch) * H, [&](int task, int thread) {
        const Unit unit;
        const size_t row = static_cast<size_t>(task / H) * T;
        const int h = task % H;
        const Number* q = k.qkv + row * 3 * C + h * D * 32;
        attention_forward(head(), q, q + 32 * C, q + 64 * C, k.attended + row * C + h * D * 32, k.lse + static_cast<size_t>(task) * T,
                          scratch(thread));
      });
      pool_.run(chunks(), [&](int task, int thread) {
        const Unit unit;
        const int first = task * rows_, n = std::min(rows_, M - first);
        after_attention(l, first, n, thread);
        if (l + 1 < L) to_qkv(l + 1, first, n, thread);
        else
          for (int r = first; r < first + n; r += 32)
            normalise(x_ + size(r, C), p_[kGainF], p_[kBiasF], C, xhat_f_ + size(r, C), inverse_f_ + r, y_ + size(r, C));
      });
    }
  }

  Head head() const {
    return {T, D, 3ul * static_cast<size_t>(C), static_cast<size_t>(C), 1.f / std::sqrt(static_cast<float>(D))};
  }

  // Writes blocks with their bias into a matrix of `width` columns.
  template <class To>
  static auto into(To* out, int width, const float* bias) {
    return [=](int row, int column, const float* block) {
      To* to = out + static_cast<size_t>(row) * width + column * 32;
      const Vec b[2] = {bias ? load(bias + column) : all(0.f), bias ? load(bias + column + 16) : all(0.f)};
      for (int i = 0; i < 1024; i += 32) {
        store(to + i, _mm512_add_ps(load(block + i), b[0]));
        store(to + i + 16, _mm512_add_ps(load(block + i + 16), b[1]));
      }
    };
  }

  // Adds blocks and their bias to the residual stream.
  auto onto(float* out, const float* bias) const {
    return [=, C = C](int row, int column, const float* block) {
      float* to = out + static_cast<size_t>(row) * C + column * 32;
      const Vec b[2] = {bias ? load(bias + column) : all(0.f), bias ? load(bias + column + 16) : all(0.f)};
      for (int i = 0; i < 1024; i += 32) {
        store(to + i, _mm512_add_ps(load(to + i), _mm512_add_ps(load(block + i), b[0])));
        store(to + i + 16, _mm512_add_ps(load(to + i + 16), _mm512_add_ps(load(block + i + 16), b[1])));
      }
    };
  }

  void to_qkv(int l, int first, int n, int thread) {
    const Kept& k = kept_[l];
    const float* const* p = layer(p_, l);
    Number* y = reinterpret_cast<Number*>(scratch(thread));
    for (int r = 0; r < n; r += 32)
      normalise(x_ + size(first + r, C), p[kGain1], p[kBias1], C, k.xhat1 + size(first + r, C), k.inverse1 + first + r,
                y + size(r, C));
    product(y, n, packed(l, kQkv).forward, C, 3 * C, into(k.qkv + size(first, 3 * C), 3 * C, p[kQkvBias]));
  }

  void after_attention(int l, int first, int n, int thread) {
    const Kept& k = kept_[l];
    const float* const* p = layer(p_, l);
    Number* y = reinterpret_cast<Number*>(scratch(thread));
    Number* act = y + size(rows_, C);
    float* x = x_ + size(first, C);
    product(k.attended + size(first, C), n, packed(l, kOut).forward, C, C, onto(x, p[kOutBias]));
    for (int r = 0; r < n; r += 32)
      normalise(x + size(r, C), p[kGain2], p[kBias2], C, k.xhat2 + size(first + r, C), k.inverse2 + first + r,
                y + size(r, C));
    Number* up = k.up + size(first, 4 * C);
    const float* bias = p[kUpBias];
    product(y, n, packed(l, kUp).forward, C, 4 * C, [=, this](int row, int column, const float* block) {
      const size_t at = size(row, 4 * C) + column * 32;
      const Vec b[2] = {bias ? load(bias + column) : all(0.f), bias ? load(bias + column + 16) : all(0.f)};
      for (int i = 0; i < 1024; i += 16) {
        store(act + at + i, gelu(store(up + at + i, _mm512_add_ps(load(block + i), b[i / 16 % 2]))));
      }
    });
    product(act, n, packed(l, kDown).forward, 4 * C, C, onto(x, p[kDownBias]));
  }
};
