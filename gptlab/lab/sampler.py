"""The sampling process: text from a run's newest checkpoint, a piece a line, outside the kernel.

    $ echo '{"id": 1, "run": "runs/first", "prompt": "def "}' | python -m gptlab.lab.sampler

Requests and answers are JSON, one object a line. A request: `id`, `run` (its folder), and what `sampling.sample` takes;
a newer request ends the one that is being answered, and `{"id": n, "stop": true}` does no more than that. Answers:
`{"id", "piece"}` each, `{"id", "step"}` when the checkpoint is chosen, and at the end, of a stop too,
`{"id", "done": true}` or `{"id", "error"}`. Left out on purpose: how text is drawn (`sampling.py`).
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

SAMPLED = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
"""What a request may say of the sampling."""


def answer(request: dict[str, Any], requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Answers one request, until it is done or a newer one has come."""
    number = request["id"]
    if request.get("stop"):
        return _say(id=number, done=True)  # the request that it ends may never have been begun
    try:
        from gptlab.runs import Run
        from gptlab.sampling import sample

        run = Run(Path(request["run"]))
        if checkpoints := run.checkpoints():
            _say(id=number, step=int(checkpoints[-1].name.removeprefix("step-")))
        for piece in sample(run, **{name: request[name] for name in SAMPLED if name in request}):
            if not requests.empty():
                break
            _say(id=number, piece=piece)
        _say(id=number, done=True)
    except Exception as error:  # a mistake in the request or a damaged checkpoint: said, not fatal
        from gptlab.config import ConfigError

        _say(id=number, error=str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")


def _say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _listen(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Takes requests while another is being answered; the end of standard input ends the process at once."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Answers requests until standard input ends."""
    os.nice(10)  # training comes first
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on a core that trains wait for each other
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    while True:
        request = requests.get()
        if requests.empty():  # the newest counts
            answer(request, requests)


if __name__ == "__main__":
    main()
