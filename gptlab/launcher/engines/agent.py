"""The process around a foreign agent (torchrun's, DLRover's): ends it with its caller, and writes the last word.

    python -m gptlab.launcher.engines.agent RUN --alone -- torchrun ... -m gptlab.worker RUN    (`handles.start_agent`)

Standard input is the leash: its end says that the caller has ended, however it did. The agent and its workers are then
killed (agents leave their workers to themselves, which therefore watch their parents as well), and the run is `lost`,
to be resumed. SIGTERM asks for the same, and the run is `stopped`. Where other nodes take part the last word is not
this process's: they may be about to go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from gptlab.config import ConfigError
from gptlab.launcher import ending
from gptlab.recording import Claim
from gptlab.runs import Run

ALONE = "--alone"
"""No other node takes part: what this agent leaves undone nobody does."""
LOOK_S = 0.2
"""Seconds between two looks for the run's result."""
LINGER_S = 10.0
"""How long the agent may take to leave then."""
PATIENCE_S = 2.0
"""How long the workers' lock may take to be free once they are gone."""


def main(argv: list[str]) -> int:
    """Runs the command behind `--`; returns its exit code."""
    run, command = Run(Path(argv[0])), argv[argv.index("--") + 1 :]
    alone = ALONE in argv[: argv.index("--")]
    before = len(run.attempts())
    asked, orphaned = threading.Event(), threading.Event()
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        words = f"{command[0]} cannot be started ({error.strerror})"
        print(words, file=sys.stderr)
        if alone:
            close(run, before, words)
        return 1

    def hear(number: int, frame: object) -> None:
        asked.set()
        end_family(process.pid)

    signal.signal(signal.SIGTERM, hear)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch_caller, args=(process.pid, orphaned), name="leash", daemon=True).start()
    code = wait(process, run, before)
    if alone and not orphaned.is_set():
        close(run, before, f"the agent gave up, with exit code {code}", killed=asked.is_set())
    return code


def wait(process: subprocess.Popen[bytes], run: Run, before: int) -> int:
    """Until the agent has left; one that lingers when the run has its result is ended. Returns its exit code."""
    until = None
    while True:
        try:
            return process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if until is None and has_result(run, before):
                until = time.monotonic() + LINGER_S
            if until is not None and time.monotonic() > until:
                end_family(process.pid)


def has_result(run: Run, before: int) -> bool:
    """Whether this start has brought the run to its end."""
    made, result = run.attempts()[before:], run.result()
    return result is not None and bool(made) and result.get("attempt", 0) >= int(made[0].name)


def watch_caller(pid: int, orphaned: threading.Event) -> None:
    """Ends everything when the caller has ended."""
    while os.read(0, 1):
        pass
    orphaned.set()  # a run that nobody has ended is lost, not failed
    end_family(pid)
    os._exit(1)


def end_family(pid: int) -> None:
    """Kills a process and all that it started."""
    import psutil

    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family[1:], timeout=2)


def close(run: Run, before: int, words: str, *, killed: bool = False) -> None:
    """Writes the final record where this start has none: the agent gave up, or was told to end.

    Args:
        before: attempts that the run had when this start began.
        words: why the agent is gone.
    """
    try:
        claim = Claim(run.path, wait_s=PATIENCE_S)
    except (ConfigError, OSError):  # other nodes go on with the run, or its directory is gone
        return
    with claim:
        if has_result(run, before):
            return
        made = run.attempts()[before:]
        attempt = int(made[-1].name) if made else claim.new_attempt()  # an earlier start's result is not this one's
        if killed:
            ending.end(run, attempt, "stopped", message="killed on request")
        elif made:
            ending.fail(run, attempt, ending.failure_of(run, made[-1]), words)
        else:
            ending.end(run, attempt, "failed", message=f"{words}, before its first attempt")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
