"""The training step's forward and backward pass as one kernel of our own, for CPUs: in bfloat16 on AMX tiles, in
float32 on AVX-512.

    >>> from gptlab.native import choose
    >>> from gptlab.presets import preset
    >>> choose("auto", preset("10m"), "cpu", "float32", "sdpa")[0]    # on a CPU with AVX-512
    'native'

torch's kernels spend most of a step between the matrix products: they cast and copy, wait for each other after every
operation, and take the gradients of attention and of weights at a third of the products' rate. Here whole blocks of the
network run on rows that are still in the cache, and the residual stream, all sums and all gradients stay float32
(`gpt.cpp`, and the headers it names). The plain twin is the model itself, under autocast or in float32.

The C++ is compiled once with the machine's own compiler, without torch's headers, into the user's cache. Left out on
purpose: dropout, what came after GPT-2, other instruction sets and GPUs; they train with torch's kernels.
"""

from gptlab.native.build import choose

__all__ = ["choose"]
