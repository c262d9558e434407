// The backward pass: four phases a layer, of which the last makes all gradients of its weights.
#pragma once
#include "loss.h"

class Backward : public Loss {
 public:
  using Loss::Loss;

  // The sum of the losses over the targets that count; the gradients of `scale` times it are added.
  double run(const int64_t* ids, const int64_t* targets, float scale) {
    forward(ids);
    const double total = loss(targets, scale);
    for (int l = L - 1; l >= 0; l--) backward(l);
    embedding_backward(ids);
    return total;
  }

 private:
  // A weight's gradient: one task a stretch of 128 columns of `right` (M x ld). Its sums over the rows go to
  // `bias`, where that is given.
  void gradient_task(int task, const Number* left, const Number* right, int ld, float* grad, size_t ld_grad, bool turned,
                     float* bias, int thread) {
    const Unit unit;
    const int column = task * 128, width = std::min(128, ld - column);
    Number* pack = reinterpret_cast<Number*>(scratch(thread));
    for (int from = 0; from < M; from += kDepth) {
      const int depth = std::min(kDepth, M - from);
      for (int row = 0; row < depth; row += 32)
        pack_right(right + size(from + row, ld) + column * 32, width, pack + row / 32 * kBlock, size(depth, 32));
      if (bias)
        for (int c = 0; c < width; c += 16) {
          Vec s = load(bias + column + c);
          for (int row = from; row < from + depth; row += 32) {
            const Number* block = right + size(row, ld) + column * 32 + c / 32 * kBlock + c % 32;
            for (int r = 0; r < 32; r++) s = _mm512_add_ps(s, load(block + 32 * r));
          }
          store(bias + column + c, s);
        }
      weight_gradient(left, pack, M, from, depth, width, turned ? grad + size(column, ld_grad) : grad + column, ld_grad,
                      turned);
    }
  }

  // Adds the sums over the rows of a transposed left operand to a bias, 32 features.
  void left_bias(const Number* left, int row, float* bias) {
    if (!bias) return;
    const Number* panel = left + size(row, M);
    for (int r = 0; r < 32; r++) {
      Vec s = all(0.f);
      for (int m = 0; m < M; m += 32) {
        const Number* p = panel + m / 32 * kBlock + r * 32;
        s = _mm512_add_ps(s, _mm512_add_ps(load(p), load(p + 16)));
      }
      bias[row + r] += _mm512_reduce_add_ps(s);
    }
  }

  void backward(int l) {
    const Kept& k = kept_[l];
    float* const* g = layer(g_, l);
    pool_.run(chunks(), [&](int task, int thread) {
      const Unit unit;
      mlp_backward(l, task, thread);
    });
    pool_.run(static_cast<int>(s_.batch) * H, [&](int task, int thread) {
      const Unit unit;
      const size_t row = static_cast<size_t>(task / H) * T;
      const int h = task % H;
      const Number* q = k.qkv + row * 3 * C + h * D * 32;
      Number* dq = dqkv_ + row * 3 * C + h * D * 32;
      attention_backward(head(), q, q + 32 * C, q + 64 * C, k.attended + row * C + h * D * 32, datt_ + row * C + h * D * 32,
                         k.lse + static_cast<size_t>(task) * T, dq, dq + 32 * C, dq + 64 * C, scratch(thread));
    });
    pool_.run(chunks(), [&](int task, int thread) {
      const Unit unit;
      qkv_backward(l, task, thread);
    });
    const int c1 = (C + 127) / 128, c3 = (3 * C + 127) / 128, c4 = (4 * C + 127) / 128;
    pool_.run(c4 + c4 + c3 + c1 + C / 32, [&](int task, int thread) {
      if (task < c4) return gradient_task(task, left_down_, act_, 4 * C, g[kDown], 4 * C, false, nullptr, thread);
      if ((task -= c4) < c4) return gradient_task(task, left_up_, k.up, 4 * C, g[kUp], C, true, g[kUpBias], thread);
      if ((task -= c4) < c3) return gradient_task(task, left_qkv_, dqkv_, 3 * C, g[kQkv], C, true, g[kQkvBias], thread);
      if ((task -= c3) < c1) return gradient_task(task, left_out_, k.attended, C, g[kOut], C, false, nullptr, thread);
      task = 32 * (task - c1);
      left_bias(left_down_, task, g[kDownBias]);
      left_bias(left_out_, task, g[kOutBias]);
      sum_partials(0, task, g[kGain1], g[kBias1]);
      sum_partials(1, task, g[kGain2], g[kBias2]);
    });
  }

  // Rounds rows of the residual's gradient, and packs them as a transposed left operand.
  void round_rows(const float* dx, int first, int n, Number* rounded, Number* left) {
    for (size_t i = 0; i < size(n, C); i += 16) store(rounded + i, load(dx + i));
    pack_rows(rounded, first, n, left);
  }

  void pack_rows(const Number* rows, int first, int n, Number* left) {
    for (int r = 0; r < n; r += 32)
      pack_left_transposed(rows + size(r, C), C, left + (first + r) / 32 * kBlock, size(M, 32));
  }

  void mlp_backward(int l, int task, int thread) {
    const Kept& k = kept_[l];
    const float* const* p = layer(p_, l);
    const int first = task * rows_, n = std::min(rows_, M - first);
    float *dx = x_ + size(first, C), *dy = reinterpret_cast<float*>(scratch(thread));
    Number* rounded = reinterpret_cast<Number*>(dy + size(rows_, C));
    Number *up = k.up + size(first, 4 * C), *act = act_ + size(first, 4 * C);
    round_rows(dx, first, n, rounded, left_down_);
    product(rounded, n, packed(l, kDown).backward, C, 4 * C, [=, this](int row, int column, const float* block) {
      const size_t at = size(row, 4 * C) + column * 32;
      for (int i = 0; i < 1024; i += 16) {
        Vec slope;
        store(act + at + i, gelu(load(up + at + i), &slope));
        store(up + at + i, _mm512_mul_ps(load(block + i), slope));  // from here on the gradient
      }
    });
    product(up, n, packed(l, kUp).backward, 4 * C, C, into(dy, C, nullptr));
    float* sums = partial_ + size(task, 4 * C) + 2 * C;
    for (int r = 0; r < n; r += 32) {
      renormalise(k.xhat2 + size(first + r, C), p[kGain2], p[kBias2], C, rounded + size(r, C));
      normalise_backward(dy + size(r, C), k.xhat2 + size(first + r, C), k.inverse2 + first + r, p[kGain2], C,
                         dx + size(r, C), sums, sums + C);
    }
    pack_rows(rounded, first, n, left_up_);
    round_rows(dx, first, n, rounded, left_out_);
    product(rounded, n, packed(l, kOut).backward, C, C, into(datt_ + size(first, C), C, nullptr));
  }

  void qkv_backward(int l, int task, int thread) {
    const Kept& k = kept_[l];
    const float* const* p = layer(p_, l);
    const int first = task * rows_, n = std::min(rows_, M - first);
    float *dx = x_ + size(first, C), *dy = reinterpret_cast<float*>(scratch(thread));
    Number* y = reinterpret_cast<Number*>(dy + size(rows_, C));
    product(dqkv_ + size(first, 3 * C), n, packed(l, kQkv).backward, 3 * C, C, into(dy, C, nullptr));
    float* sums = partial_ + size(task, 4 * C);
    for (int r = 0; r < n; r += 32) {
      renormalise(k.xhat1 + size(first + r, C), p[kGain1], p[kBias1], C, y + size(r, C));
      normalise_backward(dy + size(r, C), k.xhat1 + size(first + r, C), k.inverse1 + first + r, p[kGain1], C,
                         dx + size(r, C), sums, sums + C);
    }
    pack_rows(y, first, n, left_qkv_);
  }

  // Columns are shared out, so each token's gradients are added in the order of the rows.
  void embedding_backward(const int64_t* ids) {
    pool_.run(C / 32, [&](int task, int) {
      const int c = 32 * task;
      for (int r = 0; r < M; r++) {
        const float* from = x_ + row_of(r) + c * 32;
        for (float* to : {g_[kTokens] + ids[r] * C + c, g_[kPositions] + size(r % T, C) + c}) {
          store(to, _mm512_add_ps(load(to), load(from)));
          store(to + 16, _mm512_add_ps(load(to + 16), load(from + 16)));
        }
      }
    });
  }
};
