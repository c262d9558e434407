"""What the fork server imports before it forks a worker: all that a run's first step would import otherwise.

Importing this module is its purpose: `import torch` alone takes a second and a half, torch._dynamo (which AdamW
imports when first used) another. Nothing is computed here: a fork after torch has run a kernel hangs in its first
parallel region on a CPU and fails on CUDA.
"""

import contextlib
import gc
import importlib

MODULES = (
    "gptlab.launcher.entry", "gptlab.worker", "gptlab.training", "gptlab.parallel.world", "gptlab.native.rates",
    "numpy.ctypeslib", "platformdirs.unix", "resource", "safetensors.torch",
    # Left by torch until there is an optimizer or a process group.
    "torch._dynamo", "torch.distributed",
)  # fmt: skip
"""Found by comparing sys.modules before and after a short run in a worker."""

for name in MODULES:
    with contextlib.suppress(Exception):  # what cannot be imported fails in the worker, whose log says why
        importlib.import_module(name)
gc.collect()
gc.freeze()  # forked processes share these pages; a collection would write to every one
