"""What a config costs: exact where it can be, and held against torch where torch can count."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from test_variants import SWITCHES as VARIANTS
from torch.utils.flop_counter import FlopCounterMode

from gptlab import costs, counts, footprint, hardware, peaks
from gptlab.config import ConfigError, GPTConfig, TrainConfig
from gptlab.model import GPT
from gptlab.optimizer import make_optimizer
from gptlab.presets import PRESETS, preset
from gptlab.worker import settle

SMALL = GPTConfig(n_layer=2, n_head=3, n_embd=48, block_size=32, vocab_size=65)
GIB = 2**30
SWITCHES = VARIANTS | {"grouped_turned": {"n_kv_head": 2, "rope": True, "qk_norm": True}}


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080), ("gpt2-xl", 1557611200)],
)
def test_published_counts(name: str, count: int) -> None:
    assert costs.parameters(preset(name)).total == count


def switched(name: str, **shape: Any) -> GPTConfig:
    """A config with one of the switches on."""
    return GPTConfig.from_dict({"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 100} | shape | SWITCHES[name])


@pytest.mark.parametrize("config", [preset(name, bias=bias) for name in PRESETS for bias in (True, False)])
def test_counts_of_presets_are_the_models_own(config: GPTConfig) -> None:
    hold_counts(config)


@pytest.mark.parametrize("name", SWITCHES)
def test_counts_of_switches_are_the_models_own(name: str) -> None:
    hold_counts(switched(name))
    hold_counts(switched(name, n_head=2, n_embd=20, bias=False))


def hold_counts(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(config)
    real: dict[str, int] = {}
    for key, parameter in model.named_parameters():
        group = next(
            group
            for word, group in {
                "wte": "token_embedding", "wpe": "position_embedding", "ln_": "layer_norm",
                "attn": "attention", "mlp": "mlp", "lm_head": "head",
            }.items()
            if word in key
        )  # fmt: skip
        real[group] = real.get(group, 0) + parameter.numel()
    count = costs.parameters(config)
    assert count.allocated == sum(parameter.numel() for parameter in model.parameters())
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    for group in ("token_embedding", "head"):
        if group in real:
            real[group] -= padding
    assert real == {group: size for group, size in count.groups.items() if size}
    assert sum(count.groups.values()) == count.total


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("vocab_size", [65, 257])
def test_flops_are_what_torch_counts(vocab_size: int, name: str) -> None:
    config = switched(name, n_layer=3, block_size=48, vocab_size=vocab_size)
    model = GPT(config, attention="math")
    ids = torch.zeros(2, 48, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    assert costs.flops_per_token(config) * ids.numel() == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("chunks", [False, True], ids=["whole", "chunks"])
def test_activations_are_what_autograd_keeps(
    chunks: bool, name: str, dtype: str, attention: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunks:
        monkeypatch.setattr(counts, "LOGIT_BYTES", 50_000)
    config = switched(name, block_size=64, dropout=dropout)
    model = GPT(config, attention=attention)  # type: ignore[arg-type]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(4, 64, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        loss = model(ids, ids)
    assert loss.requires_grad
    predicted = costs.activation_bytes(config, 4, dtype, attention=attention)
    made = ids.numel() * config.n_embd * 4 if chunks and not config.logit_softcap else 0  # with the loss: its gradient
    assert predicted == pytest.approx(sum(storage.nbytes() for storage in kept.values()) + made, rel=0.02)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_is_what_the_optimizer_keeps(kind: str) -> None:
    config = TrainConfig(**SMALL.shape().to_dict(), optimizer=kind)  # type: ignore[arg-type]
    model = GPT(config)
    optimizer = make_optimizer(model, config)
    ids = torch.zeros(1, 32, dtype=torch.long)
    model(ids, ids).backward()
    optimizer.step()
    real = sum(p.numel() * 4 + p.grad.numel() * 4 for p in model.parameters() if p.grad is not None)
    real += sum(t.numel() * 4 for state in optimizer.state.values() for t in state.values() if t.dim() > 0)
    assert costs.state_bytes(config) == real


def test_a_micro_batch_is_of_a_share_of_the_whole_world() -> None:
    """Twelve sequences over two machines with two processes each: three for each process, and not six."""
    config = preset("tiny", nproc=2, global_batch_size=12)
    assert [costs.micro_batch(config, 24 * GIB, "float32", 2, "cpu", world)[0] for world in (1, 2, 4)] == [12, 6, 3]


def test_the_cost_of_a_pipeline_is_that_of_the_micro_batch_it_takes() -> None:
    config = preset("10m", strategy="pp", nproc=4, global_batch_size=12, vocab_size=256, device="cpu")
    setting, _ = settle(config, {}, 4, 4)
    assert costs.cost(config)["micro_batch_size"] == setting.micro_batch_size == 1


def test_what_a_process_holds_by_strategy() -> None:
    """Of two processes: replicas hold all, gradients once; rows and stages about half; a tied embedding is on both
    ends. Of four, two stages of two replicas each."""
    config = preset("gpt2", nproc=2, global_batch_size=32, micro_batch_size=4)
    whole = costs.state_bytes(config)
    rows, stage = (footprint.share_bytes(config.replace(strategy=strategy)) for strategy in ("fsdp", "pp"))
    assert footprint.share_bytes(config) == whole <= 2 * rows < 1.001 * whole
    embedding = 16 * 50304 * 768
    assert (whole + embedding) / 2 < stage < 0.8 * whole  # the first, whose blocks are more than the last's
    four = config.replace(strategy="pp+fsdp", nproc=4, stages=2)
    assert footprint.share_bytes(four) == pytest.approx(stage / 2, rel=1e-6)
    assert footprint.share_bytes(four.replace(strategy="pp+ddp")) == stage
    peak = {
        (strategy, schedule): footprint.run_bytes(
            config.replace(strategy=strategy, pipeline_schedule=schedule), 4, "float32", "cpu"
        )
        for strategy, schedule in (("ddp", "1f1b"), ("fsdp", "1f1b"), ("pp", "1f1b"), ("pp", "gpipe"))
    }
    assert peak["ddp", "1f1b"] == footprint.run_bytes(config.replace(nproc=1), 4, "float32", "cpu")
    assert peak["fsdp", "1f1b"] < 0.95 * peak["ddp", "1f1b"]  # whose own kernels leave the allocator no gaps
    assert peak["pp", "gpipe"] > 2 * peak["pp", "1f1b"]  # 8 micro-batches under way, or 2
    assert costs.cost(config.replace(strategy="fsdp"))["state_bytes"] == rows


def test_a_run_that_cannot_fit_is_refused_with_the_figure() -> None:
    with pytest.raises(ConfigError, match=r"24\.9 GB of training state.*25\.8 GB.*gpt2-large"):
        costs.check_fits(preset("gpt2-xl"), 24 * GIB)
    costs.check_fits(preset("gpt2-large"), 24 * GIB)
    costs.check_fits(preset("gpt2-xl"), 80 * GIB)
    with pytest.raises(ConfigError, match="in 2 processes"):
        costs.check_fits(preset("gpt2-large", nproc=2), 24 * GIB, sharing=2)
    with pytest.raises(ConfigError, match="smaller micro_batch_size"):
        costs.check_fits(preset("gpt2", micro_batch_size=480), 24 * GIB)


def test_micro_batches_share_the_batch_evenly_and_fit() -> None:
    for memory in (2 * GIB, 8 * GIB, 24 * GIB, 80 * GIB):
        for batch, nproc in ((12, 1), (12, 2), (13, 1), (480, 1), (64, 3), (97, 4)):
            config = preset("10m", block_size=1024, global_batch_size=batch, nproc=nproc)
            size = costs.choose_micro_batch(config, memory)
            share = -(-batch // nproc)
            assert 1 <= size <= share
            assert footprint.run_bytes(config, size, "float32", "cpu") <= footprint.USABLE_MEMORY * memory
            assert size * config.block_size <= max(footprint.MICRO_BATCH_TOKENS, config.block_size)
    assert costs.choose_micro_batch(TrainConfig(global_batch_size=12), 24 * GIB) == 12
    assert costs.choose_micro_batch(TrainConfig(global_batch_size=64), 24 * GIB) == 32
    assert costs.choose_micro_batch(TrainConfig(global_batch_size=41), 24 * GIB) == 21  # a prime: two near-equal ones
    assert costs.choose_micro_batch(TrainConfig(micro_batch_size=5), 24 * GIB) == 5  # the user's word
    assert costs.choose_micro_batch(preset("gpt2-xl"), 24 * GIB) == 1


def test_less_memory_never_means_a_larger_micro_batch() -> None:
    sizes = [costs.choose_micro_batch(preset("gpt2"), memory * GIB) for memory in (3, 4, 6, 12, 24)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_mfu_is_null_where_the_peak_is_unknown() -> None:
    assert costs.mfu(SMALL, 1000.0, None) is None
    assert costs.mfu(SMALL, 1000.0, 2000.0 * costs.flops_per_token(SMALL)) == pytest.approx(0.5)


def test_predicted_time_follows_the_rates() -> None:
    config = TrainConfig()
    quick, lame = (peaks.Rates(rate, rate, rate, rate, rate) for rate in (1e12, 1e11))
    fast = costs.step_seconds(config, quick, micro_batch_size=12)
    slow = costs.step_seconds(config, lame, micro_batch_size=12)
    assert slow == pytest.approx(10 * fast)
    tokens = config.global_batch_size * config.block_size
    assert fast > tokens * costs.flops_per_token(config) / 1e12  # the traffic comes on top
    assert costs.step_seconds(config, quick, micro_batch_size=6, devices=2) < fast
    assert costs.step_seconds(config, quick, micro_batch_size=1) > fast  # gradients are added twelve times


def test_cost_is_plain_and_predicts_once_rates_are_known() -> None:
    peaks.cache_file().unlink()
    config = preset("gpt2", device="cpu", dtype="float32", global_batch_size=8)
    before = costs.cost(config)
    assert json.loads(json.dumps(before)) == before
    assert before["parameters"] == 124439808
    assert before["padding_parameters"] == (50304 - 50257) * 768
    assert before["predicted_step_s"] is None and before["peak_flops"] is None
    entry = dataclasses.asdict(peaks.Rates(4e11, 3e11, 1e11, 1e10, 2e10))
    key = peaks.cache_key(hardware.device_name("cpu"), "float32", hardware.cores())
    peaks.cache_file().write_text(json.dumps({key: entry}))
    after = costs.cost(config)
    assert after["peak_flops"] == 4e11 and "measured" in after["peak_source"]
    assert after["predicted_s"] == pytest.approx(after["predicted_step_s"] * config.max_iters)
    assert 0 < after["predicted_mfu"] < 1


def test_cost_imports_nothing_heavy() -> None:
    code = (
        "import sys; from gptlab.costs import cost; from gptlab.presets import preset; cost(preset('gpt2'));"
        "sys.exit(bool({'torch', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
