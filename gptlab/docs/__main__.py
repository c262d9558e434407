"""Builds the API reference from the docstrings, with the pages beside this file: `make docs`.

    python -m gptlab.docs build/docs                  # or of some modules alone:
    python -m gptlab.docs build/docs gptlab.config

pdoc does the work. A warning of its, such as a module that cannot be imported or a page that is not there, is exit
code 1. Left out on purpose: what the pages say.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import gptlab

OURS = str(Path(__file__).parents[1])


def reveal(modules: Sequence[str]) -> None:
    """Loads the names that packages load when they are used, and has each list its modules beside them: pdoc shows what
    `__all__` lists and nothing else."""
    packages = ["gptlab", *(info.name for info in pkgutil.walk_packages(gptlab.__path__, "gptlab.") if info.ispkg)]
    for name in packages:
        if not any(f"{name}.".startswith(f"{module}.") for module in modules):
            continue
        package = importlib.import_module(name)
        if listed := getattr(package, "__all__", None):
            vars(package).update({name: getattr(package, name) for name in listed})
            inside = (info.name for info in pkgutil.iter_modules(package.__path__))
            whole = [*listed, *(name for name in inside if name not in (*listed, "__main__"))]
            vars(package)["__all__"] = whole


def main(argv: Sequence[str]) -> int:
    """Writes the pages of the modules that are named, or of all, into a folder; returns the exit code."""
    try:
        import pdoc
    except ImportError:
        print("The reference needs pdoc: pip install 'gptlab[docs]'.", file=sys.stderr)
        return 2
    out, modules = Path(argv[0] if argv else "build/docs"), argv[1:] or ["gptlab"]
    pdoc.render.configure(docformat="google")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reveal(modules)
        pdoc.pdoc(*modules, output_directory=out)
    theirs = str(Path(pdoc.__file__).parent)
    said = [one for one in caught if one.filename.startswith((OURS, theirs))]  # not what torch says of itself
    for one in said:
        print(f"{one.filename}:{one.lineno}: {one.message}", file=sys.stderr)
    if not said:
        print(f"written to {out / 'index.html'}")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
