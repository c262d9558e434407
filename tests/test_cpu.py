"""What a CPU is called and can do, also where the system says it in another way than Linux."""

from __future__ import annotations

import sys

import pytest

from gptlab import cpu


def test_linux_says_model_and_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: "model name\t: A CPU @ 2 GHz \nflags\t\t: fpu avx2\nflags\t: fpu\n")
    assert cpu.cpu_name.__wrapped__() == "A CPU @ 2 GHz"
    assert cpu.cpu_flags.__wrapped__() == {"fpu", "avx2"}


def test_arm_says_features_and_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: "processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert cpu.cpu_flags.__wrapped__() == {"fp", "asimd", "bf16"}
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu.cpu_name.__wrapped__() == "aarch64"


def test_macos_is_asked_and_may_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: "")
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(cpu, "output_of", lambda command: "Apple M9" if command[0] == "sysctl" else "")
    assert cpu.cpu_name.__wrapped__() == "Apple M9" and not cpu.cpu_flags.__wrapped__()
    monkeypatch.setattr(cpu, "output_of", lambda command: "")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert cpu.cpu_name.__wrapped__() == "arm64"


def test_a_command_that_fails_or_is_not_there_says_nothing() -> None:
    assert cpu.output_of([sys.executable, "-c", "print(' 7 ')"]) == "7"
    assert cpu.output_of([sys.executable, "-c", "raise SystemExit(1)"]) == ""
    assert cpu.output_of(["gptlab-has-no-such-command"]) == ""
