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
constexpr int kLossRows = 2048;  // rows whose logits exist at once
constexpr int kDepth = 2048;    // rows that a product for a weight's gradient takes at once

template <class T>
inline T* take(char*& at, size_t count) {
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
};
