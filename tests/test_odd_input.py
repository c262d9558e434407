"""The command under odd input: each mistake is one sentence and exit code 2, before anything is started or made."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptlab.cli import COMMANDS, main
from gptlab.config import LIMITS, ConfigError, TrainConfig, field_types
from gptlab.flags import Parser
from gptlab.launcher import client
from gptlab.recording import check_name, create_run
from gptlab.runs import Run

ODD = ("nan", "inf", "-inf", "1e400", "two", "true", "", "0x10", "9" * 30, "-1e30", "9" * 5000)
MISSING = "mps" if sys.platform != "darwin" else "cuda"
"""A device that this machine does not have."""
WORDS = {
    "train": ["--preset", "tiny"], "sweep": ["--preset", "tiny"], "cost": [], "tune": ["tiny"], "sample": ["r"],
    "bench": ["train", "tiny"], "fit": ["t.csv", "--n", "N", "--loss", "L"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A try that would start something fails."""

    def started(*_: object, **__: object) -> NoReturn:
        raise AssertionError("it was started")

    monkeypatch.chdir(tmp_path)
    for name in ("supervisor", "start"):
        monkeypatch.setattr(client, name, started)
    monkeypatch.setattr("gptlab.tuning.measure", started)
    monkeypatch.setattr("gptlab.benchmark.isolation.run", started)
    monkeypatch.setattr("gptlab.sweeps.Sweep.start", started)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and len(err) < 1000, (words, out, err)
    return err


def parser_of(command: str) -> Parser:
    parser = Parser(command, "")
    COMMANDS[command][1](parser)
    return parser


def numeric(command: str) -> list[str]:
    """Flags of a command that take a number."""
    fields = [name for name, kind in field_types(TrainConfig).items() if kind in (int, float, int | None, float | None)]
    return [
        action.option_strings[-1]
        for action in parser_of(command)._actions
        if action.option_strings and (callable(action.type) or action.dest in fields or action.dest == "batch_size")
    ]


def test_no_number_is_without_limits() -> None:
    """A flag's own `type` would let nan, inf and a million digits through."""
    for command in COMMANDS:
        for action in parser_of(command)._actions:
            assert action.type not in (int, float), f"{command} {action.option_strings}: use flags.whole or flags.real"
    assert {command for command in COMMANDS if numeric(command)} == set(WORDS)


@pytest.mark.parametrize("command", WORDS)
def test_numbers_that_are_none_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("N,L\n1,2\n")
    for flag in numeric(command):
        for odd in ODD:
            said = refused([command, *WORDS[command], f"{flag}={odd}"], capsys)
            assert flag.strip("-") in said.replace("_", "-") or flag == "--batch-size", (flag, odd, said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sweep --preset tiny --seeds 0", "from 1 to"),
        ("sweep --preset tiny --at-once 1000000", "from 1 to"),
        ("fit t.csv --n N --loss L --hold-back -1", "from 1 to"),
        ("fit t.csv --n N --loss L --draws 0", "from 20 to"),
        ("fit t.csv --n N --loss L --delta 0", "from 1e-09 to"),
        ("bench train tiny --pairs 0", "from 1 to"),
        ("tune tiny --tune-budget 0", "from 1 to"),
        ("tune tiny --preset tiny", "without --preset"),
        ("tune tiny --strategy fsdp --nproc 2", "strategy fsdp is not tuned"),
        ("tune c.json", "data"),
        ("train --preset tiny --tune-budget 9", "give both"),
        ("train --resume r --tune", "leave out --tune"),
        ("bench train tiny --only nanogpt", "give one of them"),
        ("bench train d.json", "task classify is not benched"),
        ("runs watch --json", "gptlab runs --json"),
        ("sample r --top-p 1.5", "from 0 to 1"),
        ("sweep --preset tiny --n-layer " + " ".join(map(str, range(1, 100))) + " --n-head "
         + " ".join(map(str, range(1, 100))), "9,801 cells"),
        ("sweep --preset tiny --seeds 9999", "9,999 cells"),
        ("tune tiny --out none/x.json", "no folder"),
        ("bench train tiny --plot x.xyz", "ending"),
        ("bench train tiny --output .", "ending"),
        ("report r --out .", "folder"),
        (f"train --preset tiny --device {MISSING}", f"device {MISSING} cannot be used on this machine"),
        ("train --preset tiny --data=", "data is empty"),
        ("train --preset tiny --name=", "cannot be a folder"),
        ("sweep --preset tiny --name=", "cannot be a folder"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_the_work(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"t.csv": "N,L\n1,2\n", "c.json": '{"data": 5}', "d.json": '{"task": "classify"}'}
    for name, text in files.items():
        Path(name).write_text(text)
    assert said in refused(line.split(" "), capsys)
    assert sorted(path.name for path in Path().iterdir() if path.name != "cache") == sorted(files)


@pytest.mark.parametrize("action", ["show", "stop", "rm", "export"])
@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "", ".", "..", "/", "a\0b", "new\nline", "\udcff"])
def test_names_of_no_run_are_refused(action: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["runs", action, name], capsys)
    if action == "show":
        for words in (
            ["sample", name],
            ["eval", name],
            ["report", name],
            ["pipeline", name],
            ["train", "--resume", name],
        ):
            refused(words, capsys)


@pytest.mark.parametrize("folder", ["x" * 300, "a\0b", "/proc/none", "/dev/null"])
def test_folders_that_hold_no_runs_are_refused(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="runs-dir"):
        create_run(TrainConfig(), "a", Path(folder))
    assert main(["runs", "--runs-dir", folder]) in (0, 2)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(max_size=120) | st.text("漢éx.-_ ", min_size=1, max_size=120))
def test_a_name_works_everywhere_or_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "names"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run = create_run(TrainConfig(), name, folder)
    except ConfigError as error:
        assert "\n" not in str(error) and not folder.exists()
        return
    assert run.name == name and [path.name for path in folder.iterdir()] == [name]
    assert Run.open(name, folder).config == TrainConfig()
    (folder / f".{name}.sweep.json.1234567-1234567").touch()  # the longest name that is made of one


@pytest.mark.parametrize("name", ["grid.sweep.json", "grid.sweep.csv", "a.sweep.sh", "a.sweep-3.log", "漢" * 100])
def test_names_that_mean_something_else_or_are_too_long_in_bytes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name)


def test_a_hint_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("my run", "first"):
        create_run(TrainConfig(), name, Path("runs"))
        said = refused(["train", "--preset", "tiny", "--name", name, "--runs-dir", "runs"], capsys)
        assert ("--resume 'my run'`" if " " in name else "--resume first`") in said


def test_removing_takes_all_or_none_and_follows_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Path(os.environ["GPTLAB_RUNS"])
    one, two = (create_run(TrainConfig(), name, runs) for name in ("one", "two"))
    (runs / "linked").symlink_to(one.path)
    assert main(["runs", "rm", "two", "nosuch"]) == 2 and two.path.exists()
    assert main(["runs", "stop", "two", "one"]) == 2 and not (two.path / "stop").exists()
    assert main(["runs", "rm", "linked"]) == 0 and one.path.exists() and not (runs / "linked").exists()
    assert main(["runs", "rm", "one", "one"]) == 0 and not one.path.exists()
    monkeypatch.chdir(two.path)
    capsys.readouterr()
    assert main(["runs", "rm", "."]) == 0 and "two is removed" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert not two.path.exists()


def any_value() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)
    return plain | st.lists(plain, max_size=2) | st.dictionaries(st.text(max_size=3), plain, max_size=2)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from([*field_types(TrainConfig), "n_lyer", ""]), any_value(), max_size=4))
def test_any_settings_are_a_config_or_a_sentence(values: dict[str, Any]) -> None:
    try:
        config = TrainConfig.from_dict(values)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return
    assert all(LIMITS[name][0] <= getattr(config, name) <= LIMITS[name][1] for name in values if name in LIMITS
               if getattr(config, name) is not None)  # fmt: skip
