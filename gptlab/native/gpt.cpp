// GPT-2's loss and gradients on a CPU with AMX: bfloat16 products, everything else float32.
//
// The same numbers as the model under bfloat16 autocast (`model.py`), to rounding. The residual stream, LayerNorms,
// softmaxes, sums and all gradients of parameters are float32. A step is a sequence of phases over the threads of a pool;
// what belongs to a row is done while the row is in the cache: attention aside, a whole block is one phase.
//
// Shape letters: B batch, T time, M = B T rows, C width, H heads, D = C / H, V vocabulary, L layers. T, C and D are
// multiples of 32. Called through ctypes (`engine.py`), which owns all memory.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "attention.h"
#include "pool.h"
#include "rows.h"

namespace {

struct Shape {  // as engine.py lays it out
  int64_t layers, heads, width, vocabulary, padded_vocabulary, batch, time;
};

// Where a layer's parameters stand in the lists that engine.py hands over; an absent bias is null.
enum { kGain1, kBias1, kQkv, kQkvBias, kOut, kOutBias, kGain2, kBias2, kUp, kUpBias, kDown, kDownBias, kPerLayer };
enum { kTokens, kPositions, kGainF, kBiasF, kShared };  // before them

constexpr int kGroup = 256;     // columns of logits that lie together
constexpr int kLossRows = 2048;  // rows whose logits exist at once
constexpr int kDepth = 2048;    // rows that a product for a weight's gradient takes at once

template <class T>
T* take(char*& at, size_t count) {
  T* here = reinterpret_cast<T*>(at);
  at += (count * sizeof(T) + 63) / 64 * 64;
  return here;
}

struct Packed {  // a weight (N outputs, K inputs) in bfloat16
  bf16* forward;   // as right operand of x W^T
  bf16* backward;  // as right operand of dy W
};

struct Kept {  // what the backward pass needs of a layer
  bf16 *xhat1, *qkv, *attended, *xhat2, *up;
  float *inverse1, *lse, *inverse2;
};

int rows_at_once(int64_t rows) { return rows >= 4096 ? 256 : rows >= 1024 ? 128 : 32; }

class Pass {
 public:
  Pass(Pool& pool, const Shape& s, const float* const* weights, float* const* grads, char* packed, char* work)
      : pool_(pool), s_(s), p_(weights), g_(grads), L(s.layers), C(s.width), H(s.heads), D(C / H), T(s.time),
        M(static_cast<int>(s.batch * s.time)), V(s.vocabulary), VP(s.padded_vocabulary), rows_(rows_at_once(M)) {
    char* at = packed;
    for (int l = 0; l < L; l++)
      for (int w : {kQkv, kOut, kUp, kDown}) packed_.push_back(pack_place(at, out_of(w), in_of(w)));
    packed_.push_back(pack_place(at, VP, C));
    packed_bytes = at - packed;
    plan(work);
  }

  size_t packed_bytes, work_bytes;

  void pack_weights() {
    for (int l = 0; l < L; l++)
      for (int w : {kQkv, kOut, kUp, kDown}) pack(layer(p_, l)[w], out_of(w), in_of(w), packed(l, w));
    pack(p_[kTokens], VP, C, packed_.back());
  }

  // The sum of the losses over the targets that count; the gradients of `scale` times it are added.
  double run(const int64_t* ids, const int64_t* targets, float scale) {
    forward(ids);
    const double total = loss(targets, scale);
    for (int l = L - 1; l >= 0; l--) backward(l);
    embedding_backward(ids);
    return total;
  }

 private:
  Pool& pool_;
  const Shape s_;
  const float* const* p_;
  float* const* g_;
  const int L, C, H, D, T, M, V, VP, rows_;
  std::vector<Packed> packed_;
  std::vector<Kept> kept_;
  float *x_, *partial_, *tops_, *sums_, *at_target_, *inverse_f_;
  double* losses_;
  bf16 *xhat_f_, *y_, *act_, *datt_, *dqkv_, *logits_;
  bf16 *left_down_, *left_up_, *left_out_, *left_qkv_;  // transposed left operands of the weights' gradients
  char* scratch_;
  size_t scratch_size_;

  int out_of(int w) const { return w == kQkv ? 3 * C : w == kUp ? 4 * C : C; }
  int in_of(int w) const { return w == kDown ? 4 * C : C; }
  template <class P>
  P layer(P list, int l) const { return list + kShared + l * kPerLayer; }
  const Packed& packed(int l, int w) const { return packed_[4 * l + (w == kQkv ? 0 : w == kOut ? 1 : w == kUp ? 2 : 3)]; }
  int chunks() const { return (M + rows_ - 1) / rows_; }
  int loss_rows() const { return std::min(M, kLossRows); }
  int groups() const { return (VP + kGroup - 1) / kGroup; }
  char* scratch(int thread) const { return scratch_ + thread * scratch_size_; }
  size_t size(int rows, int columns) const { return static_cast<size_t>(rows) * columns; }
  size_t row_of(int r) const { return size(r / 32 * 32, C) + r % 32 * 32; }  // its place in the first block of C columns

  static Packed pack_place(char*& at, int n, int k) {
    const size_t count = static_cast<size_t>(n) * k;
    bf16* forward = take<bf16>(at, count);
    return {forward, take<bf16>(at, count)};
  }

  void plan(char* at) {
    char* const start = at;
    const size_t MC = size(M, C);
    for (int l = 0; l < L; l++) {
      Kept k;
      k.xhat1 = take<bf16>(at, MC), k.qkv = take<bf16>(at, 3 * MC), k.attended = take<bf16>(at, MC);
      k.xhat2 = take<bf16>(at, MC), k.up = take<bf16>(at, 4 * MC);
      k.inverse1 = take<float>(at, M), k.inverse2 = take<float>(at, M), k.lse = take<float>(at, size(M, H));
      kept_.push_back(k);
    }
    x_ = take<float>(at, MC), xhat_f_ = take<bf16>(at, MC), inverse_f_ = take<float>(at, M);
    partial_ = take<float>(at, size(chunks(), 4 * C));
    left_down_ = take<bf16>(at, MC), left_up_ = take<bf16>(at, MC);
    left_out_ = take<bf16>(at, MC), left_qkv_ = take<bf16>(at, MC);
    losses_ = take<double>(at, M), at_target_ = take<float>(at, M);
    tops_ = take<float>(at, size(groups(), loss_rows())), sums_ = take<float>(at, size(groups(), loss_rows()));
    // The logits are gone when the backward pass through the blocks begins.
    char* shared = at;
    y_ = take<bf16>(at, MC), logits_ = take<bf16>(at, size(loss_rows(), VP));
    char* const end = at;
    act_ = take<bf16>(shared, 4 * MC), datt_ = take<bf16>(shared, MC), dqkv_ = take<bf16>(shared, 3 * MC);
    at = std::max(end, shared);
    const size_t block = size(rows_, C);
    scratch_size_ = std::max({attention_forward_scratch(T, D), attention_backward_scratch(T, D),
                              block * 2 + block * 8, block * 2 * 3 + block * 4, size(std::min(M, kDepth), 128) * 2,
                              size(kSide, kGroup) * 4}) + 4096;
    scratch_size_ = (scratch_size_ + 4095) / 4096 * 4096;
    scratch_ = take<char>(at, scratch_size_ * pool_.threads());
    work_bytes = at - start;
  }

  void pack(const float* w, int n, int k, const Packed& to) {
    pool_.run(n / 32, [&](int task, int) {
      const float* rows = w + size(task * 32, k);
      for (int c = 0; c < k; c += 32)
        for (int half = 0; half < 2; half++) {
          __m512i r[16];
          for (int i = 0; i < 16; i++) {
            const float* p = rows + size(16 * half + i, k) + c;
            r[i] = (__m512i)_mm512_cvtne2ps_pbh(load(p + 16), load(p));
          }
          transpose(r);
          put(to.forward + size(task * 32, k) + c / 32 * kPair + half * kTile, r);
          for (int i = 0; i < 16; i++) {
            const float* p = rows + size(2 * i, k) + c + 16 * half;
            r[i] = pair(narrow(load(p)), narrow(load(p + k)));
          }
          put(to.backward + size(c, n) + task * kPair + half * kTile, r);
        }
    });
  }

  // ---- forward ----

  void forward(const int64_t* ids) {
    pool_.run(chunks(), [&](int task, int thread) {
      const int first = task * rows_, n = std::min(rows_, M - first);
      for (int r = first; r < first + n; r++) {
        const float *token = p_[kTokens] + ids[r] * C, *position = p_[kPositions] + size(r % T, C);
        for (int c = 0; c < C; c += 16)
          store(x_ + row_of(r) + c / 32 * kPair + c % 32, _mm512_add_ps(load(token + c), load(position + c)));
      }
      Tiles tiles;
      to_qkv(0, first, n, thread);
    });
    for (int l = 0; l < L; l++) {
      const Kept& k = kept_[l];
      pool_.run(static_cast<int>(s_.batch) * H, [&](int task, int thread) {
        Tiles tiles;
        const size_t row = static_cast<size_t>(task / H) * T;
        const int h = task % H;
        const bf16* q = k.qkv + row * 3 * C + h * D * 32;
        attention_forward(head(), q, q + 32 * C, q + 64 * C, k.attended + row * C + h * D * 32, k.lse + static_cast<size_t>(task) * T,
                          scratch(thread));
      });
      pool_.run(chunks(), [&](int task, int thread) {
        Tiles tiles;
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
  template <class Number>
  static auto into(Number* out, int width, const float* bias) {
    return [=](int row, int column, const float* block) {
      Number* to = out + static_cast<size_t>(row) * width + column * 32;
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
    bf16* y = reinterpret_cast<bf16*>(scratch(thread));
    for (int r = 0; r < n; r += 32)
      normalise(x_ + size(first + r, C), p[kGain1], p[kBias1], C, k.xhat1 + size(first + r, C), k.inverse1 + first + r,
                y + size(r, C));
    product(y, n, packed(l, kQkv).forward, C, 3 * C, into(k.qkv + size(first, 3 * C), 3 * C, p[kQkvBias]));
  }

  void after_attention(int l, int first, int n, int thread) {
    const Kept& k = kept_[l];
    const float* const* p = layer(p_, l);
    bf16* y = reinterpret_cast<bf16*>(scratch(thread));
    bf16* act = y + size(rows_, C);
    float* x = x_ + size(first, C);
    product(k.attended + size(first, C), n, packed(l, kOut).forward, C, C, onto(x, p[kOutBias]));
    for (int r = 0; r < n; r += 32)
      normalise(x + size(r, C), p[kGain2], p[kBias2], C, k.xhat2 + size(first + r, C), k.inverse2 + first + r,
                y + size(r, C));
    bf16* up = k.up + size(first, 4 * C);
    const float* bias = p[kUpBias];
    product(y, n, packed(l, kUp).forward, C, 4 * C, [=, this](int row, int column, const float* block) {
      const size_t at = size(row, 4 * C) + column * 32;
      const Vec b[2] = {bias ? load(bias + column) : all(0.f), bias ? load(bias + column + 16) : all(0.f)};
      for (int i = 0; i < 1024; i += 16) {
        const __m256i rounded = narrow(_mm512_add_ps(load(block + i), b[i / 16 % 2]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(up + at + i), rounded);
        store(act + at + i, gelu(widen(rounded)));
      }
    });
    product(act, n, packed(l, kDown).forward, 4 * C, C, onto(x, p[kDownBias]));
  }

  // ---- loss ----

  bf16* logits(int row, int id) const { return logits_ + size(row, VP) + id * 32; }
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
        pack_left_transposed(y_ + size(start + 32 * task, C), C, left_down_ + task * kPair, size(n, 32));
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
    Tiles tiles;
    float* strip = reinterpret_cast<float*>(scratch(thread));  // blocks (32, kGroup)
    const int width = group_width(g), real = std::min(width, V - g * kGroup);
    for (int row = 0; row < n; row += 32) {
      const bf16* y = y_ + size(start + row, C);
      bf16* out = logits(row, g * kGroup);
      for (int c = 0; c < width; c += 32) {
        zero_block();
        add_product(y, packed_.back().forward + size(g * kGroup + c, C), C / 32);
        store_block(strip + c * 32, 32);
      }
      for (int r = 0; r < 32; r++) {
        float* s = strip + r * 32;  // column c at c / 32 * 1024 + c % 32
        const auto at = [](int c) { return c / 32 * kPair + c % 32; };
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
    Tiles tiles;
    bf16* right = reinterpret_cast<bf16*>(scratch(thread));  // as right operand: panels of 32 ids
    const size_t panel = size(n, 32);
    const int first_id = g * kGroup + from;
    for (int row = 0; row < n; row += 32) {
      bf16* blocks = logits(row, first_id);
      for (int r = 0; r < 32; r++) {
        bf16* s = blocks + r * 32;
        const int64_t target = targets[start + row + r];
        const Vec lse = all(tops_[row + r]), share = all(target < 0 ? 0.f : scale);
        for (int c = 0; c < width; c += 16) {
          bf16* p = s + c / 32 * kPair + c % 32;
          store(p, _mm512_mul_ps(exp(_mm512_sub_ps(load(p), lse)), share));
        }
        const int64_t at = target - first_id;
        if (at >= 0 && at < width) {
          const float p = std::exp(at_target_[start + row + r] - tops_[row + r]);
          alignas(64) float one[16];
          bf16* line = s + at / 32 * kPair + at % 32 / 16 * 16;
          store(one, load(line));
          one[at % 16] = (p - 1.f) * scale;
          store(line, load(one));
        }
      }
      pack_right(blocks, width, right + row / 32 * kPair, panel);
    }
    weight_gradient(left_down_, right, n, 0, n, width, g_[kTokens] + size(first_id, C), C, true);
  }

  // The gradient of y, and through the last LayerNorm that of x, for some rows.
  void head_backward(int from, int step, int start, int n, int thread) {
    Tiles tiles;
    float* dy = reinterpret_cast<float*>(scratch(thread));
    const int rows = std::min(step, n - from);
    const bf16* w = packed_.back().backward;
    const size_t panel = size(VP, 32);
    constexpr int at_once = 1024;  // ids: their logits and weights' panels stay in the cache
    for (int id = 0; id < VP; id += at_once)
      for (int column = 0; column < C; column += 32)
        for (int row = 0; row < rows; row += 32) {
          float* block = dy + size(row, C) + column * 32;
          id == 0 ? zero_block() : load_block(block, 32);
          add_product(logits(from + row, id), w + column / 32 * panel + size(id, 32), std::min(at_once, VP - id) / 32);
          store_block(block, 32);
        }
    const int first = start + from;
    for (int r = 0; r < rows; r += 32) {
      float* sums = partial_ + size((first + r) / rows_, 4 * C);
      normalise_backward(dy + size(r, C), xhat_f_ + size(first + r, C), inverse_f_ + first + r, p_[kGainF], C,
                         x_ + size(first + r, C), sums, sums + C);
    }
  }

  // ---- backward ----

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
  void weight_gradient(const bf16* left, const bf16* right, int total, int from, int depth, int width, float* grad,
                       size_t ld, bool turned) {
    alignas(64) float block[kSide * kSide];
    for (int row = 0; row < C; row += 32) {
      const bf16* a = left + size(row, total) + from / 32 * kPair;
      for (int column = 0; column < width; column += 32) {
        const bf16* b = right + size(column, depth);
        if (!turned) {
          float* to = grad + size(row, ld) + column;
          load_block(to, ld);
          add_product(a, b, depth / 32);
          store_block(to, ld);
          continue;
        }
        zero_block();
        add_product(a, b, depth / 32);
        store_block(block, kSide);
        for (int x = 0; x < 32; x += 16)
          for (int y = 0; y < 32; y += 16) {
            __m512i r[16];
            for (int z = 0; z < 16; z++) r[z] = _mm512_castps_si512(load(block + (x + z) * kSide + y));
            transpose(r);
            for (int z = 0; z < 16; z++) {
              float* to = grad + size(column + y + z, ld) + row + x;
              store(to, _mm512_add_ps(load(to), _mm512_castsi512_ps(r[z])));
            }
          }
      }
    }
  }

  // A weight's gradient: one task a stretch of 128 columns of `right` (M x ld). Its sums over the rows go to
  // `bias`, where that is given.
  void gradient_task(int task, const bf16* left, const bf16* right, int ld, float* grad, size_t ld_grad, bool turned,
                     float* bias, int thread) {
    Tiles tiles;
    const int column = task * 128, width = std::min(128, ld - column);
    bf16* pack = reinterpret_cast<bf16*>(scratch(thread));
    for (int from = 0; from < M; from += kDepth) {
      const int depth = std::min(kDepth, M - from);
      for (int row = 0; row < depth; row += 32)
        pack_right(right + size(from + row, ld) + column * 32, width, pack + row / 32 * kPair, size(depth, 32));
      if (bias)
        for (int c = 0; c < width; c += 16) {
          Vec s = load(bias + column + c);
          for (int row = from; row < from + depth; row += 32) {
            const bf16* block = right + size(row, ld) + column * 32 + c / 32 * kPair + c % 32;
            for (int r = 0; r < 32; r++) s = _mm512_add_ps(s, load(block + 32 * r));
          }
          store(bias + column + c, s);
        }
      weight_gradient(left, pack, M, from, depth, width, turned ? grad + size(column, ld_grad) : grad + column, ld_grad,
                      turned);
    }
  }

  // Adds the sums over the rows of a transposed left operand to a bias, 32 features.
  void left_bias(const bf16* left, int row, float* bias) {
    if (!bias) return;
    const bf16* panel = left + size(row, M);
    for (int r = 0; r < 32; r++) {
      Vec s = all(0.f);
      for (int m = 0; m < M; m += 32) {
        const bf16* p = panel + m / 32 * kPair + r / 16 * kTile + r % 16 * 32;
        s = _mm512_add_ps(s, _mm512_add_ps(load(p), load(p + 16)));
      }
      bias[row + r] += _mm512_reduce_add_ps(s);
    }
  }

  void backward(int l) {
    const Kept& k = kept_[l];
    float* const* g = layer(g_, l);
    pool_.run(chunks(), [&](int task, int thread) {
      Tiles tiles;
      mlp_backward(l, task, thread);
    });
    pool_.run(static_cast<int>(s_.batch) * H, [&](int task, int thread) {
      Tiles tiles;
      const size_t row = static_cast<size_t>(task / H) * T;
      const int h = task % H;
      const bf16* q = k.qkv + row * 3 * C + h * D * 32;
      bf16* dq = dqkv_ + row * 3 * C + h * D * 32;
      attention_backward(head(), q, q + 32 * C, q + 64 * C, k.attended + row * C + h * D * 32, datt_ + row * C + h * D * 32,
                         k.lse + static_cast<size_t>(task) * T, dq, dq + 32 * C, dq + 64 * C, scratch(thread));
    });
    pool_.run(chunks(), [&](int task, int thread) {
      Tiles tiles;
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
  void round_rows(const float* dx, int first, int n, bf16* rounded, bf16* left) {
    for (size_t i = 0; i < size(n, C); i += 16) store(rounded + i, load(dx + i));
    pack_rows(rounded, first, n, left);
  }

  void pack_rows(const bf16* rows, int first, int n, bf16* left) {
    for (int r = 0; r < n; r += 32)
      pack_left_transposed(rows + size(r, C), C, left + (first + r) / 32 * kPair, size(M, 32));
  }

  void mlp_backward(int l, int task, int thread) {
    const Kept& k = kept_[l];
    const float* const* p = layer(p_, l);
    const int first = task * rows_, n = std::min(rows_, M - first);
    float *dx = x_ + size(first, C), *dy = reinterpret_cast<float*>(scratch(thread));
    bf16* rounded = reinterpret_cast<bf16*>(dy + size(rows_, C));
    bf16 *up = k.up + size(first, 4 * C), *act = act_ + size(first, 4 * C);
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
    bf16* y = reinterpret_cast<bf16*>(dy + size(rows_, C));
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

}  // namespace

extern "C" {

// Asks the system for the tiles; 1 where they are granted (Linux: Documentation/arch/x86/xstate.rst).
int gptlab_ready() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

Pool* gptlab_pool(int threads) { return new Pool(threads); }

void gptlab_pool_end(Pool* pool) { delete pool; }

// Bytes of the packed weights and of the work space.
void gptlab_sizes(Pool* pool, const Shape* shape, int64_t* packed, int64_t* work) {
  const Pass pass(*pool, *shape, nullptr, nullptr, nullptr, nullptr);
  *packed = static_cast<int64_t>(pass.packed_bytes);
  *work = static_cast<int64_t>(pass.work_bytes);
}

void gptlab_pack(Pool* pool, const Shape* shape, const float* const* weights, char* packed) {
  Pass(*pool, *shape, weights, nullptr, packed, nullptr).pack_weights();
}

double gptlab_run(Pool* pool, const Shape* shape, const float* const* weights, float* const* grads, char* packed,
                  char* work, const int64_t* ids, const int64_t* targets, float scale) {
  return Pass(*pool, *shape, weights, grads, packed, work).run(ids, targets, scale);
}
}
