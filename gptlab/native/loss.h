// The head and the loss, a stretch of rows at a time, and with them the gradients of weights: logits are made, turned
// into their gradient and used up in the cache's order, as Numbers.
#pragma once
#include "forward.h"

class Loss : public Forward {
 protected:
  using Forward::Forward;

  Number* logits(int row, int id) const { return logits_ + size(row, VP) + id * 32; }
  int group_width(int group) const { return std::min(kGroup, VP - group * kGroup); }

  // The head, a stretch of rows at a time. y_ holds the last LayerNorm's output; x_ becomes the gradient of its input.
  double loss(const int64_t* targets, float scale) {
    const int at_once = loss_rows();
    pool_.run(chunks(), [&](int task, int) {
      std::fill(x_ + size(task * rows_, C), x_ + size(std::min(M, (task + 1) * rows_), C), 0.f);
      std::fill(partial_ + size(task, 4 * C), partial_ + size(task + 1, 4 * C), 0.f);
    });
    for (int start = 0; start < M; start += at_once) {
      const int n = std::min(at_once, M - start);
      pool_.run(groups(), [&](int g, int thread) { logits_of(g, start, n, targets, thread); });
      pool_.run(n / 32, [&](int task, int) {
        for (int r = 32 * task; r < 32 * task + 32; r++) close_row(r, start + r, n, targets[start + r]);
        pack_left_transposed(y_ + size(start + 32 * task, C), C, left_down_ + task * kBlock, size(n, 32));
      });
      pool_.run(2 * groups(), [&](int task, int thread) {
        head_gradient(task / 2, task % 2 * 128, start, n, targets, scale, thread);
      });
      const int step = std::min(rows_, n), tasks = (n + step - 1) / step;
      pool_.run(tasks, [&](int task, int thread) { head_backward(task * step, step, start, n, thread); });
    }
    pool_.run(C / 32, [&](int task, int) { sum_partials(0, 32 * task, g_[kGainF], g_[kBiasF]); });
    double total = 0;
    for (int r = 0; r < M; r++) total += losses_[r];
    return total;
  }

  // Logits of a group of ids for all rows, and each row's largest and its sum of exponentials there.
  void logits_of(int g, int start, int n, const int64_t* targets, int thread) {
    const Unit unit;
    float* strip = reinterpret_cast<float*>(scratch(thread));  // blocks (32, kGroup)
    Block block;
    const int width = group_width(g), real = std::min(width, V - g * kGroup);
    for (int row = 0; row < n; row += 32) {
      const Number* y = y_ + size(start + row, C);
      Number* out = logits(row, g * kGroup);
      for (int c = 0; c < width; c += 32) {
        block.zero();
        block.add(y, packed_.back().forward + size(g * kGroup + c, C), C / 32);
        block.store(strip + c * 32, 32);
      }
      for (int r = 0; r < 32; r++) {
        float* s = strip + r * 32;  // column c at c / 32 * 1024 + c % 32
        const auto at = [](int c) { return c / 32 * kBlock + c % 32; };
        for (int c = real; c < width; c++) s[at(c)] = -1e30f;
        Vec top = load(s);
        for (int c = 16; c < width; c += 16) top = _mm512_max_ps(top, load(s + at(c)));
        const float high = _mm512_reduce_max_ps(top);
        Vec total = all(0.f);
        for (int c = 0; c < width; c += 16) {
          const Vec v = load(s + at(c));
          total = _mm512_add_ps(total, exp(_mm512_sub_ps(v, all(high))));
          store(out + r * 32 + at(c), v);
        }
        tops_[size(g, n) + row + r] = high;
        sums_[size(g, n) + row + r] = _mm512_reduce_add_ps(total);
        const int64_t target = targets[start + row + r] - g * kGroup;
        if (target >= 0 && target < width) at_target_[start + row + r] = s[at(static_cast<int>(target))];
      }
    }
  }

  // Joins a row's groups; tops_ of the first group becomes the log of the whole sum.
  void close_row(int r, int row, int n, int64_t target) {
    float high = tops_[r];
    for (int g = 1; g < groups(); g++) high = std::max(high, tops_[size(g, n) + r]);
    double total = 0;
    for (int g = 0; g < groups(); g++) total += sums_[size(g, n) + r] * std::exp(tops_[size(g, n) + r] - high);
    tops_[r] = high + static_cast<float>(std::log(total));
    losses_[row] = target < 0 ? 0.0 : static_cast<double>(tops_[r]) - at_target_[row];
  }

  // Turns 128 columns of logits into the gradient of the loss, and adds its product with y to the embedding's gradient.
  void head_gradient(int g, int from, int start, int n, const int64_t* targets, float scale, int thread) {
    const int width = std::min(128, group_width(g) - from);
    if (width <= 0) return;
    const Unit unit;
    Number* right = reinterpret_cast<Number*>(scratch(thread));  // as right operand: panels of 32 ids
    const size_t panel = size(n, 32);
    const int first_id = g * kGroup + from;
    for (int row = 0; row < n; row += 32) {
      Number* blocks = logits(row, first_id);
      for (int r = 0; r < 32; r++) {
        Number* s = blocks + r * 32;
        const int64_t target = targets[start + row + r];
        const Vec lse = all(tops_[row + r]), share = all(target < 0 ? 0.f : scale);
        for (int c = 0; c < width; c += 16) {
          Number* p = s + c / 32 * kBlock + c % 32;
          store(p, _mm512_mul_ps(exp(_mm512_sub_ps(load(p), lse)), share));
        }
        const int64_t at = target - first_id;
        if (at >= 0 && at < width) {
          const float p = std::exp(at_target_[start + row + r] - tops_[row + r]);
          alignas(64) float one[16];
          Number* line = s + at / 32 * kBlock + at % 32 / 16 * 16;
          store(one, load(line));
          one[at % 16] = (p - 1.f) * scale;
          store(line, load(one));
        }
      }
      pack_right(blocks, width, right + row / 32 * kBlock, panel);
    }
    weight_gradient(left_down_, right, n, 0, n, width, g_[kTokens] + size(first_id, C), C, true);
  }

  // The gradient of y, and through the last LayerNorm that of x, for some rows.
  void head_backward(int from, int step, int start, int n, int thread) {
    const Unit unit;
    float* dy = reinterpret_cast<float*>(scratch(thread));
    const int rows = std::min(step, n - from);
    const Number* w = packed_.back().backward;
    const size_t panel = size(VP, 32);
    Block block;
    constexpr int at_once = 1024;  // ids: their logits and weights' panels stay in the cache
    for (int id = 0; id < VP; id += at_once)
      for (int column = 0; column < C; column += 32)
        for (int row = 0; row < rows; row += 32) {
          float* to = dy + size(row, C) + column * 32;
          id == 0 ? block.zero() : block.load(to, 32);
          block.add(logits(from + row, id), w + column / 32 * panel + size(id, 32), std::min(at_once, VP - id) / 32);
          block.store(to, 32);
        }
    const int first = start + from;
    for (int r = 0; r < rows; r += 32) {
      float* sums = partial_ + size((first + r) / rows_, 4 * C);
      normalise_backward(dy + size(r, C), xhat_f_ + size(first + r, C), inverse_f_ + first + r, p_[kGainF], C,
                         x_ + size(first + r, C), sums, sums + C);
    }
  }

  // Adds a column's partial sums, in the order of the chunks, to the gradients of a LayerNorm's gain and bias.
  void sum_partials(int which, int column, float* gain, float* bias) {
    for (int c = column; c < column + 32; c += 16) {
      Vec a = load(gain + c), b = bias ? load(bias + c) : all(0.f);
      for (int chunk = 0; chunk < chunks(); chunk++) {
        float* p = partial_ + size(chunk, 4 * C) + which * 2 * C + c;
        a = _mm512_add_ps(a, load(p));
        b = _mm512_add_ps(b, load(p + C));
        store(p, all(0.f));
        store(p + C, all(0.f));
      }
      store(gain + c, a);
      if (bias) store(bias + c, b);
    }
  }

  // grad += left right, over rows `from` to `from + depth`, for all C rows of left (whose panels hold `total` rows) and
  // `width` columns of right (whose panels hold these rows alone). Turned: grad is (columns, rows) instead.
  void weight_gradient(const Number* left, const Number* right, int total, int from, int depth, int width, float* grad,
                       size_t ld, bool turned) {
    alignas(64) float sums[kBlock];
    Block block;
    for (int row = 0; row < C; row += 32) {
      const Number* a = left + size(row, total) + from / 32 * kBlock;
      for (int column = 0; column < width; column += 32) {
        const Number* b = right + size(column, depth);
        if (!turned) {
          float* to = grad + size(row, ld) + column;
          block.load(to, ld);
          block.add(a, b, depth / 32);
          block.store(to, ld);
          continue;
        }
        block.zero();
        block.add(a, b, depth / 32);
        block.store(sums, kSide);
        for (int x = 0; x < 32; x += 16)
          for (int y = 0; y < 32; y += 16) {
            Vec columns[16];
            transposed(sums + x * kSide + y, kSide, columns);
            for (int z = 0; z < 16; z++) {
              float* to = grad + size(column + y + z, ld) + row + x;
              store(to, _mm512_add_ps(load(to), columns[z]));
            }
          }
      }
    }
  }
};
