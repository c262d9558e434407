// What a pass over a micro-batch works on: its shape, the weights as the products want them, and the memory.
//
// Shape letters: B batch, T time, M = B T rows, C width, H heads, D = C / H, V vocabulary, L layers. T, C and D are
// multiples of 32.
#pragma once
#include <algorithm>

#include "attention.h"
#include "pool.h"
#include "rows.h"

struct Shape {  // as engine.py lays it out
  int64_t layers, heads, width, vocabulary, padded_vocabulary, batch, time;
};

// Where a layer's parameters stand in the lists that engine.py hands over; an absent bias is null.
enum { kGain1, kBias1, kQkv, kQkvBias, kOut, kOutBias, kGain2, kBias2, kUp, kUpBias, kDown, kDownBias, kPerLayer };
enum { kTokens, kPositions, kGainF, kBiasF, kShared };  // before them

constexpr int kGroup = 256;     // columns of logits that lie together
constexpr int kLossRows = 4096 / sizeof(Number);  // rows whose logits exist at once
constexpr int kDepth = 4096 / sizeof(Number);     // rows that a product for a weight's gradient takes at once

template <class T>
inline T* take(char*& at, size_t count) {
  T* here = reinterpret_cast<T*>(at);
  at += (count * sizeof(T) + 63) / 64 * 64;
  return here;
}

struct Packed {  // a weight (N outputs, K inputs)
  Number* forward;   // as right operand of x W^T
  Number* backward;  // as right operand of dy W
};

struct Kept {  // what the backward pass needs of a layer
  Number *xhat1, *qkv, *attended, *xhat2, *up;
  float *inverse1, *lse, *inverse2;
};

inline int rows_at_once(int64_t rows) { return rows >= 4096 ? 256 : rows >= 1024 ? 128 : 32; }

class State {
 public:
  State(Pool& pool, const Shape& s, const float* const* weights, float* const* grads, char* packed, char* work)
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

 protected:
  Pool& pool_;
  const Shape s_;
  const float* const* p_;
  float* const* g_;
  const int L, C, H, D, T, M, V, VP, rows_;
  std::vector<Packed> packed_;
  std::vector<Kept> kept_;
  float *x_, *partial_, *tops_, *sums_, *at_target_, *inverse_f_;
  double* losses_;
  Number *xhat_f_, *y_, *act_, *datt_, *dqkv_, *logits_;
  Number *left_down_, *left_up_, *left_out_, *left_qkv_;  // transposed left operands of the weights' gradients
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
    Number* forward = take<Number>(at, count);
    return {forward, take<Number>(at, count)};
  }

  void plan(char* at) {
    char* const start = at;
    const size_t MC = size(M, C);
    for (int l = 0; l < L; l++) {
      Kept k;
      k.xhat1 = take<Number>(at, MC), k.qkv = take<Number>(at, 3 * MC), k.attended = take<Number>(at, MC);
      k.xhat2 = take<Number>(at, MC), k.up = take<Number>(at, 4 * MC);
      k.inverse1 = take<float>(at, M), k.inverse2 = take<float>(at, M), k.lse = take<float>(at, size(M, H));
      kept_.push_back(k);
    }
    x_ = take<float>(at, MC), xhat_f_ = take<Number>(at, MC), inverse_f_ = take<float>(at, M);
    partial_ = take<float>(at, size(chunks(), 4 * C));
    left_down_ = take<Number>(at, MC), left_up_ = take<Number>(at, MC);
    left_out_ = take<Number>(at, MC), left_qkv_ = take<Number>(at, MC);
    losses_ = take<double>(at, M), at_target_ = take<float>(at, M);
    tops_ = take<float>(at, size(groups(), loss_rows())), sums_ = take<float>(at, size(groups(), loss_rows()));
    // The logits are gone when the backward pass through the blocks begins.
    char* shared = at;
    y_ = take<Number>(at, MC), logits_ = take<Number>(at, size(loss_rows(), VP));
    char* const end = at;
    act_ = take<Number>(shared, 4 * MC), datt_ = take<Number>(shared, MC), dqkv_ = take<Number>(shared, 3 * MC);
    at = std::max(end, shared);
    const size_t block = size(rows_, C);
    scratch_size_ = std::max({attention_forward_scratch(T, D), attention_backward_scratch(T, D),
                              block * 5 * sizeof(Number), block * (sizeof(Number) + 4),
                              size(std::min(M, kDepth), 128) * sizeof(Number), size(kSide, kGroup) * 4}) + 4096;
    scratch_size_ = (scratch_size_ + 4095) / 4096 * 4096;
    scratch_ = take<char>(at, scratch_size_ * pool_.threads());
    work_bytes = at - start;
  }

  void pack(const float* w, int n, int k, const Packed& to) {
    pool_.run(n / 32, [&](int task, int) {
      pack_weight(w + size(task * 32, k), k, to.forward + size(task * 32, k), to.backward + task * kBlock, size(n, 32));
    });
  }
};
