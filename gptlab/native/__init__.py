"""The training step's forward and backward pass as one kernel of our own, for CPUs with AMX tiles, in bfloat16.

    >>> from gptlab.presets import preset
    >>> from gptlab.native import refusal
    >>> refusal(preset("10m"), "cpu", "float32")
    'kernels of our own compute in bfloat16'

torch's kernels spend most of a step between the matrix products: they cast and copy, wait for each other after every
operation, and take the gradients of attention and of weights at a third of the products' rate. Here whole blocks of the
network run on rows that are still in the cache, and the residual stream, all sums and all gradients stay float32
(`gpt.cpp`, and the headers it names). The plain twin is the model itself under bfloat16 autocast.

The C++ is compiled once with the machine's own compiler, without torch's headers, into the user's cache. Left out on
purpose: dropout, what came after GPT-2, other instruction sets and GPUs; they train with torch's kernels.
"""

from gptlab.native.build import choose, refusal

__all__ = ["choose", "refusal"]
