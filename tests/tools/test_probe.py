"""Tests of entries of a batch that reach where they must not: in correct models, and in models with one fault each."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats.results import Probe
from tests.clients.standins import megatron, torchtitan
from tests.models import Containers, Residual, images, small_cnn
from tests.tools.probed import (
    LENGTH,
    WIDTH,
    Attention,
    Counting,
    Experts,
    Images,
    SortedExperts,
    Transformer,
    ids,
    padding_mask,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def series(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 7, 6, generator=torch.Generator().manual_seed(0))


def pack() -> torch.Tensor:
    """Positions of two documents in a row."""
    return torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(4, -1)


def find_leaks(probe: Probe) -> list[tuple[str, str]]:
    return [(leak.kind, leak.module) for leak in probe.leaks]


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "causal": (Transformer, ids(), {}),
    "causal, two rows": (Transformer, ids(2), {}),
    "causal, padded": (Transformer, {"ids": ids(), "attention_mask": padding_mask()}, {}),
    "causal, bfloat16": (lambda: Transformer().bfloat16(), (ids(), padding_mask()), {}),
    "causal, packed": (
        Transformer,
        {"ids": ids(), "position_ids": pack(), "document_ids": (pack() == 0).cumsum(1)},
        {},
    ),
    "both ways": (lambda: Transformer(None), (ids(), padding_mask()), {"causal": False}),
    "experts": (lambda: Transformer(mixture=Experts()), (ids(), padding_mask()), {}),
    "experts, bfloat16": (lambda: Transformer(mixture=Experts()).bfloat16(), (ids(), padding_mask()), {}),
    "sorted experts": (lambda: Transformer(mixture=SortedExperts()), (ids(), padding_mask()), {}),
    "lstm": (lambda: nn.LSTM(6, 9, 2, batch_first=True, dropout=0.1), series(), {"causal": True}),
    "lstm, tokens first": (lambda: nn.LSTM(6, 9, 2, dropout=0.1), series(), {"causal": True, "batch_dim": 1}),
    "gru": (lambda: nn.GRU(6, 9, batch_first=True), [series()], {"causal": True}),
    "residual": (Residual, torch.randn(4, 6, 16), {"causal": True}),
    "cnn": (small_cnn, images(6), {}),
    "images": (Images, torch.randn(3, 3, 16, 16), {}),
    "torchtitan": (torchtitan.Llama3Model, torch.randint(32, (3, 8)), {}),
    "megatron": (
        lambda: megatron.GPTModel(megatron.Region(None, 0, 1)),
        (torch.randint(32, (3, 8)), torch.randint(32, (3, 8))),
        {},
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_models_that_are_right_leak_nothing(name: str) -> None:
    make, batch, arguments = HEALTHY[name]
    probe = hookstats.probe(make(), batch, **arguments)
    assert not probe.leaks, probe
    assert probe.asked["samples"] == ("eval", "train")
    assert not any("two equal runs differ" in note for note in probe.notes), probe
    is_asked_of_tokens = "causal" in name or name in ("lstm", "gru", "residual", "torchtitan", "megatron")
    assert ("later tokens" in probe.asked) == (is_asked_of_tokens or "experts" in name or "tokens first" in name)


def no_mask_in_the_second_block() -> nn.Module:
    model = Transformer()
    model.blocks[1].attention = Attention(None)
    return model


FAULTS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], list[tuple[str, str]], str]] = {
    "no causal mask": (
        *(no_mask_in_the_second_block, ids(), {}),
        *([("later tokens", "blocks.1.attention")], "causal mask that is missing"),
    ),
    "no causal mask, bfloat16": (
        *(lambda: no_mask_in_the_second_block().bfloat16(), ids(), {}),
        *([("later tokens", "blocks.1.attention")], "causal mask that is missing"),
    ),
    "off by one": (
        *(lambda: Transformer(1), ids(), {}),
        *([("later tokens", "blocks.0.attention"), ("later tokens", "blocks.1.attention")], "off by one"),
    ),
    "bidirectional": (
        *(lambda: nn.LSTM(6, 9, bidirectional=True, batch_first=True), series(), {"causal": True}),
        *([("later tokens", "")], "bidirectional"),
    ),
    "inverted mask": (
        *(lambda: Transformer(None, "inverted"), (ids(), padding_mask()), {"causal": False}),
        *([("padding", "blocks.0.attention"), ("padding", "blocks.1.attention")], "missing or inverted"),
    ),
    "mask not used": (  # the mask of the batch hides nothing
        *(lambda: Transformer(None, "no mask"), (ids(), torch.ones(4, LENGTH)), {"causal": False}),
        *([("padding", "blocks.0.attention"), ("padding", "blocks.1.attention")], "missing or inverted"),
    ),
    "mean over padding": (
        *(lambda: Transformer(None, "mean"), (ids(), padding_mask()), {"causal": False}),
        *([("padding", "")], "mean that counts padding"),
    ),
    "padding on the left": (
        *(Transformer, (ids(), padding_mask().flip(1)), {}),
        *([("positions", "")], "position_ids"),
    ),
    "documents by position": (
        *(lambda: Transformer(), {"ids": ids(), "position_ids": pack()}, {}),
        *([("documents", "blocks.0.attention"), ("documents", "blocks.1.attention")], "mask of documents"),
    ),
    "documents by number": (
        *(lambda: Transformer(0, "no documents"), {"ids": ids(), "document_ids": (pack() == 0).cumsum(1)}, {}),
        *([("documents", "blocks.0.attention"), ("documents", "blocks.1.attention")], "mask of documents"),
    ),
    "lstm over the batch": (
        *(lambda: nn.LSTM(6, 9, 2), series(), {}),
        *([("samples", "")], "recurs over the batch: batch_first=False"),
    ),
    "lstm over the batch, tokens first": (
        *(lambda: nn.LSTM(6, 9, 2, batch_first=True), series(), {"batch_dim": 1}),
        *([("samples", "")], "recurs over the batch: batch_first=True"),
    ),
    "attention over the batch": (
        *(lambda: Images(False), torch.randn(3, 3, 16, 16), {}),
        *([("samples", f"encoder.layers.{number}.self_attn") for number in (0, 1)], "attends over the batch"),
    ),
    "positions over the batch": (
        *(lambda: Transformer(0, "place"), ids(), {}),
        *([("places in the batch", "")], "positions"),
    ),
    "experts with a capacity": (
        *(lambda: Transformer(mixture=Experts(5)), ids(), {}),
        *([("samples", "blocks.1.mlp"), ("later tokens", "blocks.1.mlp")], "look for"),
    ),
    "batch statistics in evaluation": (
        *(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)), torch.randn(5, 6), {}),
        *([("samples", "1")], "BatchNorm"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_the_module_that_has_it(name: str) -> None:
    make, batch, arguments, expected, cause = FAULTS[name]
    probe = hookstats.probe(make(), batch, **arguments)
    assert find_leaks(probe) == expected, probe
    for leak in probe.leaks:
        assert cause in leak.sentence
        assert leak.difference > leak.bound
        assert "eval" in leak.modes
        assert leak.sentence in str(probe)


def test_how_many_places_changed_and_which_is_first_is_said() -> None:
    first, second = hookstats.probe(Transformer(1), ids()).leaks
    assert (first.changed, first.judged, first.first) == (4, 4 * (LENGTH - 1), (0, LENGTH - 2))  # before the last
    assert first.seen_at == "blocks.0.attention.dropout"
    assert first.type == "Attention"
    assert second.seen_at == "blocks.1.attention.dropout"


def test_a_long_sequence_in_bfloat16_leaks_less_than_rounding_explains_and_is_found() -> None:
    class Last(nn.Module):
        """Each token gets 1 % of the last one, which is below the bound of 3 %."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.float() + 0.01 * x[:, -1:].float()).to(x.dtype)

    model = nn.Sequential(nn.Embedding(50, 64), Last()).bfloat16()
    (leak,) = hookstats.probe(model, ids()).leaks
    assert (leak.kind, leak.module) == ("later tokens", "1")
    assert leak.difference < leak.bound


def test_batch_norm_in_training_is_listed_apart_and_hides_nothing_after_it() -> None:
    probe = hookstats.probe(small_cnn(), images(6))
    assert [(each.kind, each.module, each.modes) for each in probe.by_design] == [("samples", "1", ("train",))]
    assert "by design: 1 (BatchNorm2d)" in str(probe)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wrong = nn.BatchNorm1d(6), nn.Softmax(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wrong(self.norm(x)) if self.training else self.norm(x)

    probe = hookstats.probe(Mixed(), torch.randn(5, 6))
    assert find_leaks(probe) == [("samples", "wrong")]
    assert probe.leaks[0].modes == ("train",)


def test_a_frozen_batch_norm_of_a_model_in_training_is_none() -> None:
    model = small_cnn().train()
    model[1].eval()
    assert not hookstats.probe(model, images(6)).by_design


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "nested", "with_ints"])
def test_tensors_in_containers_are_judged(kind: str) -> None:
    model = Containers(kind)
    assert not hookstats.probe(model, torch.randn(4, 6)).leaks
    model.inner.register_forward_hook(lambda module, args, output: output - output.mean(0))
    assert find_leaks(hookstats.probe(model, torch.randn(4, 6))) == [("samples", "inner")]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_bit_for_bit(fails: bool) -> None:
    model = Counting()
    model.norm.eval()
    model.layer.register_forward_hook(lambda *_: None)
    x = torch.randn(4, 6)
    given, weights = x.clone(), copy.deepcopy(model.state_dict())
    hooks = {name: list(module._forward_hooks.items()) for name, module in model.named_modules()}
    python, numpy, generator = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    own = model.generator.get_state()
    cache = model.cache
    if fails:
        with pytest.raises(ValueError, match="this batch is refused"):
            hookstats.probe(model, (x, torch.ones(4)))
    else:
        assert hookstats.probe(model, x).asked["samples"] == ("eval", "train")
    assert torch.equal(x, given)
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(model.generator.get_state(), own)
    assert (model.training, model.norm.training, model.dropout.training) == (True, False, True)
    assert model.cache is cache
    assert all(torch.equal(now, weights[name]) for name, now in model.state_dict().items())
    assert (model.calls, model.losses, hasattr(model, "new")) == (0, [1.0], False)
    assert torch.equal(model.state, torch.zeros(2))
    assert {name: list(module._forward_hooks.items()) for name, module in model.named_modules()} == hooks
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_monitor_measures_nothing_of_it() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    with hookstats.attach(model, every=1, tensors=("output",)) as monitor:
        model(torch.randn(3, 6))
        hookstats.probe(model, torch.randn(8, 6))
        model(torch.randn(3, 6))
        snapshot = monitor.step()
    assert snapshot is not None
    assert snapshot["0", "output"].total.count == 2 * 3 * 6


def test_edits_are_part_of_what_the_model_computes() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Identity())
    with hookstats.edit(model, "0", lambda x: x - x.mean(0)):
        assert find_leaks(hookstats.probe(model, torch.randn(4, 6))) == [("samples", "0")]


def test_a_model_that_draws_in_evaluation_is_not_asked_about_places() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x)

    probe = hookstats.probe(Noisy(), torch.randn(4, 6))
    assert not probe.leaks
    assert probe.not_asked["places in the batch"] == "the model draws random numbers in eval()"


def test_a_model_that_does_not_repeat_is_not_judged() -> None:
    numbers = iter(range(1000))

    class Drifting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + next(numbers)

    probe = hookstats.probe(nn.Sequential(Drifting(), nn.Softmax(0)), torch.randn(4, 6))
    assert find_leaks(probe) == [("samples", "1")]  # which is given what it was given before
    assert "two equal runs differ: 0" in str(probe)


def test_a_forward_that_writes_parameters_is_told_of() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.ones(6), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.codes.mul_(1)
            return x * self.codes

    (note,) = hookstats.probe(Codebook(), torch.randn(4, 6)).notes
    assert note == "forwards of the model write parameters, which are not as before: codes"


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_is_judged_as_a_whole_and_keeps_its_modes() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Softmax(0), nn.Dropout(0.5)))
    model[2].eval()
    probe = hookstats.probe(nn.Sequential(model, nn.ReLU()), torch.randn(4, 6))
    assert [leak.kind for leak in probe.leaks] == ["samples"]
    assert (model.training, model[2].training) == (True, False)


def test_a_compiled_model_runs_as_it_was_before() -> None:
    compiled = torch.compile(no_mask_in_the_second_block(), backend="eager")
    assert find_leaks(hookstats.probe(compiled, ids())) == [("later tokens", "blocks.1.attention")]  # type: ignore[arg-type]
    inside = no_mask_in_the_second_block()
    inside.blocks[1].compile(backend="eager")
    assert find_leaks(hookstats.probe(inside, ids())) == [("later tokens", "blocks.1.attention")]


def test_what_is_not_asked_is_said() -> None:
    probe = hookstats.probe(Transformer(), MappingProxyType({"ids": ids()}))
    assert set(probe.not_asked) == {"padding", "documents", "positions"}
    assert "not asked: padding: no mask of padding is in the batch" in str(probe)
    assert (
        hookstats.probe(Transformer(None), ids(), causal=False).not_asked["later tokens"] == "the model is not causal"
    )


def test_rows_that_are_all_equal_are_made_different() -> None:
    x = torch.ones(4, 6)
    assert find_leaks(hookstats.probe(nn.Sequential(nn.Softmax(0)), x)) == [("samples", "0")]
    same = ids(1).expand(4, -1)
    assert find_leaks(hookstats.probe(no_mask_in_the_second_block(), same)) == [("later tokens", "blocks.1.attention")]


@pytest.mark.parametrize("length", [WIDTH, 64])
def test_a_number_of_tokens_that_is_a_width_too_is_no_trap(length: int) -> None:
    class Last(nn.Module):
        """The vector of the last token, ``[samples, 1, features]``."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(9, length), nn.Linear(length, length)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.words(x)[:, -1:])

    x = torch.randint(9, (3, length))
    assert not hookstats.probe(Last(), x).leaks


def test_other_arguments_and_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected two rows at least along dimension 0.*got ids of \[1, 12\]"):
        hookstats.probe(Transformer(), ids(1))
    with pytest.raises(TypeError, match="batch: expected a tensor, or a tuple or dict of some, got dict of none"):
        hookstats.probe(Transformer(), {"ids": 3})
    with pytest.raises(ValueError, match="expected parameters that are initialised, got weight"):
        hookstats.probe(nn.LazyLinear(3), torch.randn(3, 3))


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64)
    )
    batch = {"input_ids": ids(), "attention_mask": padding_mask().flip(1), "labels": ids()}
    probe = hookstats.probe(llama, batch)
    assert not probe.leaks, probe
    assert set(probe.asked) == {"samples", "places in the batch", "later tokens", "positions", "padding"}
    without_cache = {"input_ids": ids(), "position_ids": pack(), "use_cache": False}
    probe = hookstats.probe(llama, without_cache)
    assert not probe.leaks, probe
    assert probe.asked["documents"] == ("eval", "train")
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2
        )
    )
    assert find_leaks(hookstats.probe(gpt2, batch)) == [("positions", "transformer")]
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, intermediate_size=64))
    probe = hookstats.probe(bert, {"input_ids": ids(), "attention_mask": padding_mask()})
    assert not probe.leaks, probe
    assert probe.not_asked["later tokens"] == "the model is not causal"
