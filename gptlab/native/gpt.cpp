// GPT-2's loss and gradients on a CPU. Compiled once for products in bfloat16 (AMX tiles), and once, with GPTLAB_FLOAT32,
// for products in float32 (AVX-512); everything else is float32 in both.
//
// The same numbers as the model under bfloat16 autocast or in float32 (`model.py`), to rounding. The residual stream,
// LayerNorms, softmaxes, sums and all gradients of parameters are float32. A step is a sequence of phases over the threads
// of a pool; what belongs to a row is done while the row is in the cache: attention aside, a whole block is one phase.
//
// Called through ctypes (`engine.py`), which owns all memory. What it works on is in `state.h`; then come `forward.h`,
// `loss.h` and `backward.h`.
#include "backward.h"
#ifdef GPTLAB_FLOAT32
#include "thin.h"
#endif

extern "C" {

// 1 where the system lets this process use the units that compute.
int gptlab_ready() { return granted(); }

Pool* gptlab_pool(int threads) { return new Pool(threads); }

void gptlab_pool_end(Pool* pool) { delete pool; }

// Bytes of the packed weights and of the work space.
void gptlab_sizes(Pool* pool, const Shape* shape, int64_t* packed, int64_t* work) {
  const Backward pass(*pool, *shape, nullptr, nullptr, nullptr, nullptr);
  *packed = static_cast<int64_t>(pass.packed_bytes);
  *work = static_cast<int64_t>(pass.work_bytes);
}

void gptlab_pack(Pool* pool, const Shape* shape, const float* const* weights, char* packed) {
  Backward(*pool, *shape, weights, nullptr, packed, nullptr).pack_weights();
}

double gptlab_run(Pool* pool, const Shape* shape, const float* const* weights, float* const* grads, char* packed,
                  char* work, const int64_t* ids, const int64_t* targets, float scale) {
  return Backward(*pool, *shape, weights, grads, packed, work).run(ids, targets, scale);
}

#ifdef GPTLAB_FLOAT32
// A few rows times a weight. `kind`: 0, all numbers are float32; 1, bfloat16; 2, float32 but for weights in int8.
void gptlab_thin(Pool* pool, int kind, const void* w, const float* scale, const void* bias, const void* residual,
                 const void* x, void* y, int64_t N, int64_t K, int64_t M, int gelu) {
  const auto go = [&]<class Weight, class Type>(Weight, Type) {
    const Thin<Weight, Type> thin{static_cast<const Weight*>(w), scale, static_cast<const Type*>(bias),
                                  static_cast<const Type*>(residual), static_cast<Type*>(y), static_cast<size_t>(N),
                                  static_cast<size_t>(K), static_cast<size_t>(M), gelu != 0};
    thin.run(*pool, static_cast<const Type*>(x));
  };
  if (kind == 0) go(float{}, float{});
  else if (kind == 1) go(uint16_t{}, uint16_t{});
  else go(int8_t{}, float{});
}
#endif
}
