"""Sampling: with and without cache, alone and in a batch, within the context and past its edge: the same ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gptlab.config import ConfigError, GPTConfig
from gptlab.decoding import Decoder
from gptlab.model import GPT
from gptlab.sampling import STOPPED, _pieces, generate
from gptlab.tokenizer import get_tokenizer

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=65)
PROMPTS = [torch.arange(n) * 7 % 65 for n in (5, 1, 16, 9, 30, 5)]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.9, "top_k": 20, "seed": 4},
    {"temperature": 1.1, "top_p": 0.8, "repetition_penalty": 1.5, "seed": 5},
]


@pytest.fixture(scope="module")
def model() -> GPT:
    """Decided opinions, and float64: no two logits are so near that the order of a sum decides."""
    made = GPT(SMALL).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for p in made.parameters():
        if p.dim() == 2:
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.4)
    return made.double().eval()


def texts(model: GPT, prompts: Sequence[Tensor] | Tensor, new: int = 24, **options: Any) -> list[list[int]]:
    """The ids that each row gives."""
    steps = torch.stack(list(generate(model, prompts, max_new_tokens=new, **options)), 1)  # (B, steps)
    return [[one for one in row if one != STOPPED] for row in steps.tolist()]


def plain(model: GPT, prompt: Tensor, new: int, penalty: float = 1.0) -> list[int]:
    """Greedy, as one would write it down."""
    ids = prompt.tolist()
    for _ in range(new):
        logits = model(torch.tensor([ids[-model.config.block_size :]]))[0, -1]
        for one in set(ids):
            logits[one] = logits[one] / penalty if logits[one] > 0 else logits[one] * penalty
        ids.append(int(logits.argmax()))
    return ids[-new:]


def test_greedy_is_the_plain_loop_for_every_length_and_past_the_edge(model: GPT) -> None:
    wanted = [plain(model, prompt, 24) for prompt in PROMPTS]
    assert len({one for row in wanted for one in row}) > 10
    assert texts(model, PROMPTS, temperature=0) == wanted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_gives_what_it_gives_alone(model: GPT, way: dict[str, Any], use_cache: bool) -> None:
    together = texts(model, PROMPTS, use_cache=use_cache, **way)
    assert [len(row) for row in together] == [24] * 6
    for row, prompt in enumerate(PROMPTS):
        alone = texts(model, [prompt], **(way | {"seed": way.get("seed", 0) + row}))
        assert together[row] == alone[0]


@pytest.mark.parametrize("way", WAYS)
def test_the_cache_changes_nothing(model: GPT, way: dict[str, Any]) -> None:
    assert texts(model, PROMPTS, **way) == texts(model, PROMPTS, use_cache=False, **way)


def test_float32_in_packed_layout_agrees_too(model: GPT) -> None:
    single = GPT(SMALL).eval()
    single.load_state_dict(model.state_dict())
    assert texts(single, PROMPTS, temperature=0) == texts(model, PROMPTS, temperature=0)


def test_bfloat16_samples(model: GPT) -> None:
    rows = texts(model, PROMPTS, dtype=torch.bfloat16, seed=1)
    assert [len(row) for row in rows] == [24] * 6 and all(0 <= one < 65 for row in rows for one in row)


def test_a_seed_repeats_and_rows_differ(model: GPT) -> None:
    same = torch.arange(5).expand(3, 5)
    first = texts(model, same, seed=1)
    assert first == texts(model, same, seed=1) != texts(model, same, seed=9)
    assert first[0] != first[1] != first[2] and first[1:] == texts(model, same, seed=2)[:2]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    texts(model, same, seed=1)
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's generator moves


@pytest.mark.parametrize("use_cache", [True, False])
def test_finished_rows_stop_and_the_others_go_on(model: GPT, use_cache: bool) -> None:
    free = texts(model, PROMPTS, seed=3)
    stop = {free[0][4], free[3][10], free[2][0]}
    wanted = []
    for row in free:
        end = next((n for n, one in enumerate(row) if one in stop), len(row))
        wanted.append(row[: end + 1])
    steps = torch.stack(
        list(generate(model, PROMPTS, max_new_tokens=24, seed=3, stop_ids=stop, use_cache=use_cache)), 1
    )
    assert [[one for one in row if one != STOPPED] for row in steps.tolist()] == wanted
    assert len(wanted[0]) <= 5
    for row, kept in zip(steps.tolist(), wanted, strict=True):
        assert all(one == STOPPED for one in row[len(kept) :])


def test_it_ends_when_all_rows_have_stopped(model: GPT) -> None:
    stop_ids = range(65)
    assert len(list(generate(model, PROMPTS, max_new_tokens=24, stop_ids=stop_ids))) == 1


def test_the_penalty_is_for_all_that_a_row_has_and_no_other_row(model: GPT) -> None:
    wanted = [plain(model, prompt, 24, penalty=3.0) for prompt in PROMPTS]
    assert wanted != [plain(model, prompt, 24) for prompt in PROMPTS]
    assert texts(model, PROMPTS, temperature=0, repetition_penalty=3.0) == wanted


@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_of_the_last_position_alone(model: GPT, use_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    logits = GPT.logits
    monkeypatch.setattr(GPT, "logits", lambda self, x: shapes.append(x.shape) or logits(self, x))  # type: ignore[func-returns-value]
    texts(model, PROMPTS, use_cache=use_cache)
    assert {len(shape) for shape in shapes} == {2}


def test_within_the_context_a_token_is_one_query(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []

    def spy(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def seen(self: Any, ids: Tensor, *rest: Any, **more: Any) -> Tensor:
            widths.append((owner.__name__, *ids.shape))
            return method(self, ids, *rest, **more)

        monkeypatch.setattr(owner, name, seen)

    spy(Decoder, "logits")
    spy(GPT, "hidden")
    texts(model, [torch.arange(5), torch.arange(3)], new=13)
    # 5 and 3 ids; then one each; the first row is as long as the context after 11, and slides.
    prompts = [("Decoder", 2, 5), ("GPT", 2, 5)]
    assert widths == [*prompts, *[("Decoder", 2, 1)] * 11, ("Decoder", 1, 1), ("GPT", 1, 16)]


def test_no_tensor_is_made_for_tokens_that_do_not_come(model: GPT) -> None:
    steps = generate(model, PROMPTS, max_new_tokens=10**9, seed=1)
    assert len(list(itertools.islice(steps, 20))) == 20


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "no prompt"),
        ([torch.arange(3), torch.arange(0)], {}, "Prompt 1 has no ids"),
        ([torch.tensor([65])], {}, "Prompt 0 has the id 65: give ids from 0 to 64"),
        ([torch.tensor([-1])], {}, "Prompt 0 has the id -1"),
        ([torch.arange(3)], {"new": 0}, "max_new_tokens 0"),
        ([torch.arange(3)], {"top_p": 2.0}, "top_p 2.0"),
    ],
)
def test_what_cannot_be_is_refused_at_once(model: GPT, prompts: list[Tensor], options: Any, words: str) -> None:
    new = options.pop("new", 5)
    with pytest.raises(ConfigError, match=words):
        generate(model, prompts, max_new_tokens=new, **options)


def test_characters_come_whole_row_by_row() -> None:
    tokenizer = get_tokenizer("byte")
    rows = ["aé€", "😀b"]
    columns = itertools.zip_longest(*(text.encode() for text in rows), fillvalue=STOPPED)
    steps = [torch.tensor(column) for column in [*columns, (256, STOPPED)]]
    pieces = list(_pieces(iter(steps), 2, tokenizer, (256,)))
    assert pieces == [(0, "a"), (0, "é"), (1, "😀"), (1, "b"), (0, "€")]
    half = [torch.tensor([byte]) for byte in "€".encode()[:2]]
    assert list(_pieces(iter(half), 1, tokenizer, ())) == [(0, "�")]


@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_ids_are_those_of_transformers(model: GPT, rows: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=65, bos_token_id=None, eos_token_id=None
    )
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    ours = model.state_dict()
    weights = {f"transformer.{k}": v.T if ".c_" in k and k.endswith("weight") else v for k, v in ours.items()}
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][:65]
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    theirs.load_state_dict(weights)
    prompts = torch.randint(0, 65, (rows, 5), generator=torch.Generator().manual_seed(1))
    out = theirs.generate(prompts, max_new_tokens=11, do_sample=False, attention_mask=torch.ones_like(prompts))
    assert texts(model, prompts, new=11, temperature=0) == out[:, 5:].tolist()
