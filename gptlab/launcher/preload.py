"""What the fork server imports before it forks a worker: all that a run's first step would import otherwise.

Importing this module is its purpose: `import torch` alone takes a second and a half, torch._dynamo (which AdamW and
DDP import when first used) another. Nothing is computed here: a fork after torch has run a kernel hangs in its first
parallel region on a CPU and fails on CUDA.
"""

import contextlib
import gc

with contextlib.suppress(Exception):  # what cannot be imported fails in the worker, whose log says why
    import gptlab.launcher.entry
    import gptlab.worker  # noqa: F401

with contextlib.suppress(Exception):
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

gc.collect()
gc.freeze()  # forked processes share these pages; a collection would write to every one
