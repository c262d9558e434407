"""What the machine offers: the table, what is measured and kept, and the light questions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from gptlab import hardware, kernels, peaks
from gptlab.config import ConfigError
from gptlab.peaks import Rates, known_peak
from gptlab.presets import preset

RATES = Rates(4e11, 3e11, 1e11, 1e10, 2e10)


@pytest.fixture(autouse=True)
def unmeasured(own_folders: None) -> None:
    """These tests begin on a machine that nobody has measured."""
    peaks.cache_file().unlink()
    shutil.rmtree(peaks.cache_file().parent)


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA A10", "bfloat16", 125),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla T4", "float16", 65),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA B200", "bfloat16", 2250),
    ],
)
def test_table_by_device_and_precision(name: str, dtype: str, teraflops: float) -> None:
    found = known_peak(name, dtype)
    assert found is not None and found.flops == pytest.approx(teraflops * 1e12)
    assert "data sheet" in found.source


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla T4", "bfloat16"),  # the chip has none
        ("Tesla V100-SXM2-16GB", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),  # a seventh of one
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),  # another chip
        ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
        ("NVIDIA H20", "bfloat16"),
        ("Intel(R) Xeon(R) Processor", "float32"),
    ],
)
def test_another_chips_peak_is_never_taken(name: str, dtype: str) -> None:
    assert known_peak(name, dtype) is None


def test_unknown_is_none_until_it_is_measured() -> None:
    assert hardware.peak("cpu", "float32", measure=False) is None
    assert hardware.total_peak("cpu", "float32", 2, measure=False) is None


def test_measured_once_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measure(*args: object) -> Rates:
        calls.append(args)
        return RATES

    monkeypatch.setattr(peaks, "measure", measure)
    first = hardware.peak("cpu", "float32", measure=True)
    assert first is not None and first.flops == RATES.peak_flops and first.source.startswith("measured")
    assert hardware.peak("cpu", "float32", measure=True) == first
    assert hardware.peak("cpu", "float32", measure=False) == first
    assert calls == [("cpu", "float32", hardware.cores())]
    assert hardware.peak("cpu", "bfloat16", measure=False) is None  # another precision is another rate
    (key,) = json.loads(peaks.cache_file().read_text())
    assert all(word in key for word in (hardware.cpu_name(), "float32", str(hardware.cores()), version("torch")))
    assert list(peaks.all_cached().values()) == [RATES]
    hardware.peak("cpu", "bfloat16", measure=True)
    assert len(peaks.all_cached()) == 2  # the first is still there


def test_a_busy_machines_rates_are_marked_and_serve_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[Rates] = []

    def measured(flops: float, *, busy: bool, age: float) -> float:
        """The rate that a run gets which finds the machine like this, so many seconds after it was measured."""
        reading = Rates(flops, 1e11, 1e11, 1e10, 1e10, busy=busy, time=time.time() - age)

        def measure(*_: object) -> Rates:
            readings.append(reading)
            return reading

        monkeypatch.setattr(peaks, "measure", measure)
        found = hardware.peak("cpu", "float32", measure=True)
        assert found is not None and ("while others" in found.source) == readings[-1].busy
        return found.flops

    assert measured(2e11, busy=True, age=0) == 2e11
    assert measured(9e11, busy=True, age=0) == 2e11 and len(readings) == 1  # still serves
    for key, entry in (kept := json.loads(peaks.cache_file().read_text())).items():
        kept[key] = entry | {"time": time.time() - 2 * peaks.BUSY_FOR_S}
    peaks.cache_file().write_text(json.dumps(kept))
    assert measured(1e11, busy=True, age=2 * peaks.BUSY_FOR_S) == 2e11 and len(readings) == 2  # the faster one is kept
    assert measured(1.5e11, busy=False, age=0) == 1.5e11  # a quiet machine's figure is the truth
    assert measured(3e11, busy=False, age=0) == 1.5e11 and len(readings) == 3


@pytest.mark.parametrize(
    "spoilt", ["", "not json", "[]", '{"a": 3}', '{"KEY": {"peak_flops": "1e12"}}', '{"KEY": null}']
)
def test_a_spoilt_cache_is_an_empty_one(spoilt: str) -> None:
    peaks.cache_file().parent.mkdir(parents=True)
    key = peaks.cache_key(hardware.cpu_name(), "float32", hardware.cores())
    peaks.cache_file().write_text(spoilt.replace("KEY", key))
    assert hardware.rates("cpu", "float32", measure=False) is None


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(peaks, "measure", lambda *args: RATES)
    found = hardware.peak("cpu", "float32", measure=True)
    assert found is not None and found.flops == RATES.peak_flops


def test_measuring_is_real_and_leaves_torch_as_it_was() -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = peaks.measure("cpu", "float32", 1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert found.attention_flops > 1e8 and 1e8 < found.matmul_flops < 1e14
    assert 1e8 < found.elementwise_bytes_per_s < 1e13 and 1e8 < found.copy_bytes_per_s < 1e13


def test_ranks_that_share_a_device_share_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "measure", lambda *args: RATES)
    one = hardware.total_peak("cpu", "float32", 1, measure=True)
    assert one is not None and one == hardware.total_peak("cpu", "float32", 4, measure=True)
    gpu = hardware.Device("cuda", "NVIDIA H200", 141 * 10**9, 9.0)
    monkeypatch.setattr(hardware, "devices", lambda: (gpu, gpu, hardware.Device("cpu", "x", 10**10)))
    for nproc, times in ((1, 1), (2, 2), (3, 2)):
        found = hardware.total_peak("cuda", "bfloat16", nproc, measure=False)
        assert found is not None and found.flops == pytest.approx(times * 989.5e12)


def test_cores_obey_affinity() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from gptlab import hardware; print(hardware.cores())"
    )
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "1"
    assert hardware.default_threads(1) == hardware.cores()
    assert hardware.default_threads(10**6) == 1


def test_a_containers_limits_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "_cgroups", lambda controller: [tmp_path])
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert hardware.memory_bytes() == 2**30
    assert hardware.cores() == 1
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert hardware.memory_bytes() > 2**28


def test_dtype_follows_device_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_bfloat16", lambda: "amx_bf16")
    wide, narrow = preset("10m", kernels="torch"), preset("1m", kernels="torch")
    assert hardware.resolve_dtype("auto", "cpu", wide)[0] == "bfloat16"
    assert hardware.resolve_dtype("auto", "cpu", narrow)[0] == "float32"
    assert hardware.resolve_dtype("float32", "cpu", wide) == ("float32", "as asked")
    monkeypatch.setattr(kernels, "refusal", lambda *_: None)  # a CPU that the kernel of our own serves
    assert hardware.resolve_dtype("auto", "cpu", preset("1m"))[0] == "bfloat16"
    assert hardware.resolve_dtype("auto", "cpu", narrow)[0] == "float32"
    monkeypatch.undo()
    monkeypatch.setattr(hardware, "cpu_bfloat16", lambda: None)
    assert hardware.resolve_dtype("auto", "cpu", wide)[0] == "float32"
    for capability, wanted in ((9.0, "bfloat16"), (8.0, "bfloat16"), (7.5, "float16"), (6.1, "float32")):
        gpu = hardware.Device("cuda", "NVIDIA GPU", 10**10, capability)
        monkeypatch.setattr(hardware, "devices", lambda gpu=gpu: (gpu,))
        assert hardware.resolve_dtype("auto", "cuda", narrow)[0] == wanted


def test_a_dtype_that_the_device_lacks_falls_back_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_bfloat16", lambda: None)
    old = hardware.Device("cuda", "Tesla T4", 10**10, 7.5)
    new = hardware.Device("cuda", "NVIDIA L4", 10**10, 8.9)
    for dtype, device, gpu, wanted in (
        ("bfloat16", "cpu", new, "float32"), ("tfloat32", "cpu", new, "float32"), ("float16", "cpu", new, "float16"),
        ("bfloat16", "cuda", old, "float32"), ("tfloat32", "cuda", old, "float32"), ("float16", "cuda", old, "float16"),
        ("bfloat16", "cuda", new, "bfloat16"), ("tfloat32", "cuda", new, "tfloat32"),
        ("tfloat32", "mps", new, "float32"),
    ):  # fmt: skip
        monkeypatch.setattr(hardware, "devices", lambda gpu=gpu: (gpu,))
        found, reason = hardware.resolve_dtype(dtype, device, preset("gpt2"))
        assert found == wanted
        assert reason == "as asked" if found == dtype else reason.startswith(hardware.FALLBACK) and dtype in reason


def test_a_device_that_is_not_there_is_refused() -> None:
    kind, reason = hardware.resolve_device("auto")
    assert kind in ("cpu", "cuda", "mps") and reason
    missing = "mps" if sys.platform != "darwin" else "cuda"
    with pytest.raises(ConfigError, match="auto or cpu"):
        hardware.resolve_device(missing)


def test_a_gpu_that_torch_was_not_built_for_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = hardware.Device("cuda", "NVIDIA H200", 141 * 10**9, 9.0), hardware.Device("cpu", "x", 10**10)
    monkeypatch.setattr("gptlab.hardware.sys.platform", "linux")
    monkeypatch.setattr(hardware, "devices", lambda: (gpu, cpu))
    for said, there in (("2.13.0+cpu", False), ("2.13.0+cu130", True), ("2.13.0", True)):
        monkeypatch.setattr(hardware, "_version", lambda _, said=said: said)
        assert hardware.can_use("cuda") == there
        assert hardware.can_use("cpu") and not hardware.can_use("mps")


def test_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "NVIDIA H200, 143771, 9.0, GPU-aa\nNVIDIA L4, 23034, 8.9, GPU-bb"
    monkeypatch.setattr("gptlab.hardware.shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(hardware, "output_of", lambda command: listing)
    monkeypatch.setattr("gptlab.hardware.sys.platform", "linux")
    ask = hardware.devices.__wrapped__
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [device.name for device in ask()[:2]] == ["NVIDIA H200", "NVIDIA L4"]
    assert ask()[0].memory_bytes == 143771 * 2**20 and ask()[1].capability == 8.9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [device.name for device in ask()[:-1]] == ["NVIDIA L4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [device.kind for device in ask()] == ["cpu"]


def test_a_mac_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "sys", types.SimpleNamespace(platform="darwin", version_info=sys.version_info))
    monkeypatch.setattr("gptlab.hardware.platform.machine", lambda: "arm64")
    assert [device.kind for device in hardware.devices.__wrapped__()] == ["mps", "cpu"]


def test_report_says_what_is_missing_and_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    report = hardware.report()
    assert json.loads(json.dumps(report)) == report
    assert report["cores"] == hardware.cores() and report["torch"] == version("torch")
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["torch"]["ok"] and checks["cache folder"]["ok"]
    monkeypatch.setattr("gptlab.hardware.shutil.which", lambda name: None)
    checks = {check["name"]: check for check in hardware.report()["checks"]}
    assert not checks["browser"]["ok"] and "chromium" in checks["browser"]["mend"]
    assert all((check["mend"] is None) == check["ok"] for check in checks.values())


def test_light_questions_import_no_torch() -> None:
    code = (
        "import sys; from gptlab import hardware as h, preset; h.report(); h.peak('cpu', 'float32', measure=False);"
        "h.resolve_dtype('auto', 'cpu', preset('10m')); h.likely_device();"
        "sys.exit(bool({'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
