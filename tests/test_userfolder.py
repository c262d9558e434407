"""Where a user's own things are kept: without a home no folder named ~ is made, and light commands work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gptlab import hardware, peaks
from gptlab.cli import main
from gptlab.config import ConfigError
from gptlab.kernels import cached_rates
from gptlab.userfolder import cache_folder


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home: ~ stays as it is, as for a number that no one has."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_what_needs_none_works(tinytext: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        cache_folder()
    before = sorted(Path().iterdir())
    assert peaks.all_cached() == {} and cached_rates("float32", 1) is None
    for line in ("cost", "runs", "doctor", "data"):
        assert main([line]) == 0
    (found,) = [one for one in hardware.report()["checks"] if one["name"] == "cache folder"]
    assert not found["ok"] and "XDG_CACHE_HOME" in found["mend"]
    capsys.readouterr()
    for words in (["data", "prepare", str(tinytext)], ["train", "--data", str(tinytext), "--preset", "tiny"]):
        assert main(words) == 2
        assert "set XDG_CACHE_HOME" in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before


def test_a_cache_that_cannot_be_written_is_named_with_its_mend(
    tinytext: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert main(["data", "prepare", str(tinytext)]) == 2
    said = capsys.readouterr().err
    assert "/proc" in said and "set XDG_CACHE_HOME" in said and len(said.splitlines()) == 1
