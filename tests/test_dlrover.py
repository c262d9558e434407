"""DLRover's engine without DLRover: a stand-in for its interpreter writes down what it is asked for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from labtools import until

from gptlab.config import ConfigError, TrainConfig
from gptlab.launcher.engines import dlrover
from gptlab.recording import create_run
from gptlab.runs import Run

STAND_IN = """
import json, os, socket, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
if sys.argv[1] == "-c":
    sys.exit(not os.path.exists(folder + "/dlrover"))
kind = sys.argv[2].split(".")[-1]
with open(f"{folder}/{kind}.json", "w") as file:
    json.dump([sys.argv[1:], os.environ["DLROVER_MASTER_ADDR"], os.getpid()], file)
if kind == "main":
    if not os.path.exists(folder + "/dlrover"):
        sys.exit(1)
    server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
    time.sleep(60)
sys.exit(7)
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment that has DLRover, as long as the file `dlrover` lies beside it."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "dlrover").touch()
    return script(tmp_path / "env" / "python", f"#!{sys.executable}{STAND_IN}")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(TrainConfig(n_layer=1, nproc=2, global_batch_size=4), "first", tmp_path / "runs")


def test_an_interpreter_without_it_is_refused(python: Path, tmp_path: Path) -> None:
    (python.parent / "dlrover").unlink()
    with pytest.raises(ConfigError, match=r"python has no DLRover: pip install 'gptlab\[dlrover\]'"):
        dlrover.Dlrover(dlrover_python=str(python)).check(TrainConfig())
    with pytest.raises(ConfigError, match=r"none cannot be started .*name another interpreter"):
        dlrover.Dlrover(dlrover_python=str(tmp_path / "none")).check(TrainConfig())


def test_a_machine_that_cannot_keep_it_apart_is_refused(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "install util-linux" in (dlrover.missing(str(python)) or "")
    script(tmp_path / "bin" / "unshare", "#!/bin/sh\nexit 1\n")
    assert "may not make namespaces" in (dlrover.missing(str(python)) or "")
    script(tmp_path / "bin" / "unshare", "#!/bin/sh\nexit 0\n")
    assert dlrover.missing(str(python)) is None
    dlrover.Dlrover(dlrover_python=str(python)).check(TrainConfig())


def test_who_has_no_rights_becomes_root_within(run: Run, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert dlrover.unshare()[:3] == ["unshare", "--user", "--map-root-user"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    command = dlrover.Dlrover(dlrover_python=str(python), restarts=5).command(run)
    assert command[:2] == ["unshare", "--pid"] and command[-3:] == [str(run.path.absolute()), str(python), "5"]
    assert "gptlab.launcher.engines.dlrover" in dlrover.Dlrover(dlrover_python=str(python)).plan(run)


def test_a_start_keeps_gloo_on_this_machine_and_ends_when_it_is_killed(
    run: Run, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "bin" / "unshare.said"
    script(tmp_path / "bin" / "unshare", f'#!/bin/sh\necho "$GLOO_SOCKET_IFNAME $@" > {said}\nread leash\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    handle = dlrover.Dlrover(dlrover_python=str(python)).start(run)
    until(lambda: said.exists() and said.read_text().endswith("\n"))
    handle.kill()
    until(lambda: handle.is_over)
    words = said.read_text().split()
    assert words[0] == "lo" and words[-3:] == [str(run.path.absolute()), str(python), "3"]


def test_the_agent_works_for_a_master_that_listens(
    run: Run, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "bin" / "mount", '#!/bin/sh\necho "$@" > "$0.said"\n')  # the machine's own /dev/shm stays
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert dlrover.main(run.path, str(python), 4) == 7, "the agent's exit code"
    assert (tmp_path / "bin" / "mount.said").read_text().split() == ["-t", "tmpfs", "tmpfs", "/dev/shm"]
    master, address, pid = json.loads((python.parent / "main.json").read_text())
    agent, told, _ = json.loads((python.parent / "elastic_run.json").read_text())
    assert address == told == f"127.0.0.1:{master[master.index('--port') + 1]}"
    assert {"--nproc-per-node=2", "--max-restarts=4"} <= {*agent} and agent[-1] == str(run.path.absolute())
    with pytest.raises(ProcessLookupError):  # the master ends with its agent
        os.kill(pid, 0)


def test_a_master_that_ends_at_once_is_said(
    run: Run, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "bin" / "mount", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (python.parent / "dlrover").unlink()
    with pytest.raises(SystemExit, match="master does not listen"):
        dlrover.main(run.path, str(python), 4)
    assert not (python.parent / "elastic_run.json").exists()
