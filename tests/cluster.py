"""A real SLURM of two nodes on this machine, for as long as tests or the fault campaign want one (`slurm.sh`).

with cluster(folder):    # SLURM's commands speak to it
    ...
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).with_name("slurm.sh")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "runuser")


class NoCluster(Exception):
    """Why this machine has none, and what it would take."""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Two nodes whose configuration, state and logs lie in a folder; this process's environment names them.

    Raises:
        NoCluster: SLURM is not installed, may not be started, or does not come up.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        wanted = "a SLURM of one's own needs root and Debian's slurm-wlm and munge (apt-get install slurm-wlm munge)"
        raise NoCluster(wanted + (f": there is no {', '.join(missing)}" if missing else ""))
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (folder, *folder.parents[:2]):
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o055)  # munge looks for its key as a user of its own
    began = subprocess.run([str(SCRIPT), "start", str(folder)], capture_output=True, text=True, timeout=120)
    if began.returncode:
        raise NoCluster(f"no SLURM comes up here: {began.stderr.strip()[-300:]}")
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PYTHONPATH")}
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    try:
        yield
    finally:
        subprocess.run(["scancel", "--state=RUNNING", "--user=root"], check=False)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        subprocess.run([str(SCRIPT), "stop", str(folder)], check=False)
