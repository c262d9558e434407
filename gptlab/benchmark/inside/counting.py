"""What torch's compiler did in this process: seconds, graphs, breaks with their reasons, recompiles.

    counts = Counts()
    ...               # what compiles
    counts.columns()  # by the names that users of the dynamo dashboard know

Left out on purpose: asking for compilation (`gptlab/compiling.py`).
"""

from __future__ import annotations

import sys
from typing import Any

from gptlab import compiling


class Counts:
    """Counters of torch.compile from here on."""

    def __init__(self) -> None:
        self.seconds, self.settled = compiling.seconds(), 0

    def settle(self) -> None:
        """What is compiled from here on was compiled before, for other shapes or flags."""
        self.settled = compiling.graphs()

    def columns(self) -> dict[str, Any]:
        """The dashboard's columns, and recompiles and the reasons of breaks."""
        if "torch._dynamo" not in sys.modules:
            return {}
        from torch._dynamo.utils import counters

        stats, frames, breaks = counters["stats"], counters["frames"], counters["graph_break"]
        autograd = counters["compiled_autograd"]
        return {
            "calls_captured": stats["calls_captured"], "unique_graphs": stats["unique_graphs"],
            "fallbacks_to_eager": frames["total"] - frames["ok"],
            "graph_breaks": sum(breaks.values()), "unique_graph_breaks": len(breaks),
            "autograd_captures": autograd["captures"], "autograd_compiles": autograd["compiles"],
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
            "graph_break_reasons": "; ".join(sorted({reason.strip().splitlines()[0] for reason in breaks})),
            "compile_s": compiling.seconds() - self.seconds,
        }  # fmt: skip

    def recompiles(self) -> int:
        """Graphs made since `settle`."""
        return compiling.graphs() - self.settled
