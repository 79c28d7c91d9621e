"""Identities are found where they hold, proved, and nothing of the model changes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import hookstats
from hookstats.results import Identities
from tests.identities.models import Llama, ids
from tests.language import zoo as languages
from tests.modules import zoo as others

pytestmark = pytest.mark.usefixtures("one_thread")


def found_in(model: nn.Module, *args: torch.Tensor) -> Identities:
    return hookstats.find_identities(model, lambda: model(*args))


def sides(found: Identities) -> dict[str, int]:
    """Each identity's parameters, and how many sums it has."""
    return {str(each).rpartition(" (")[0]: each.groups for each in found.identities}


def test_a_llama_has_the_identities_that_theory_gives() -> None:
    torch.manual_seed(0)
    found = sides(found_in(Llama(), ids()))
    expected = {"norm.weight = head.weight": 32}
    for n in range(2):
        attention, mlp = f"layers.{n}.attention", f"layers.{n}.mlp"
        readers = " + ".join(f"{attention}.{each}_proj.weight" for each in "qkv")
        expected |= {
            f"layers.{n}.norm1.weight = {readers}": 32,
            f"layers.{n}.norm2.weight = {mlp}.gate_proj.weight + {mlp}.up_proj.weight": 32,
            f"{mlp}.up_proj.weight = {mlp}.down_proj.weight": 64,
            f"{attention}.v_proj.weight = {attention}.o_proj.weight": 16,
            # a pair of channels is rotated together: 2 heads of keys with 4 pairs each
            f"{attention}.q_proj.weight + {attention}.q_proj.bias = {attention}.k_proj.weight": 8,
        }
    assert found == expected


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 5),
    )


def test_convolutions_pooling_and_flattening_pass_a_channel_on() -> None:
    torch.manual_seed(0)
    assert sides(found_in(conv_net(), torch.randn(2, 3, 14, 14))) == {
        "0.weight + 0.bias = 3.weight": 8,
        "4.weight + 4.bias = 7.weight": 6,  # each channel is 16 of its columns
    }


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.Tanh(), nn.LayerNorm(16, elementwise_affine=False)])
def test_what_no_scale_passes_has_no_identity(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), activation, nn.Linear(16, 4))
    assert sides(found_in(model, torch.randn(5, 8))) == {}


def test_a_reader_whose_input_lies_across_memory_is_found() -> None:
    """Its product is computed in another order if its weight wants a gradient, as the one that is tried must, too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.norm(x).transpose(0, 1))
            return out

    torch.manual_seed(0)
    assert sides(found_in(Model(), torch.randn(2, 5, 16))) == {"norm.weight + norm.bias = last.weight": 16}


def test_an_output_that_something_else_reads_has_none() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            out: torch.Tensor = self.second(y) + 0.01 * y
            return out

    torch.manual_seed(0)
    assert sides(found_in(Model(), torch.randn(5, 8))) == {}


def test_a_module_may_list_its_parameters_in_its_own_way() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.gain = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(1))

        def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
            return iter([*self.first.parameters(), *self.second.parameters(), self.gain])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.gain * self.second(torch.relu(self.first(x)))
            return out

    torch.manual_seed(0)
    found = sides(found_in(nn.Sequential(Model()), torch.randn(4, 8)))
    assert found["0.first.weight + 0.first.bias = 0.second.weight"] == 16


class Twice(nn.Module):
    """Readers and producers that are used once more: by a call, by a function, by another call of the module itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.other, self.first = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.last, self.inner = nn.Linear(8, 5), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        if self.how == "a reader of two norms":
            out = self.last(self.norm(x)) + 2 * self.last(self.other(self.first(x).relu()))
        elif self.how == "a reader that is called once more":
            out = self.last(self.first(x).relu()) + self.last(x.cos())
        elif self.how == "a weight that a function uses":
            out = F.linear(self.last(self.first(x).relu()) @ torch.ones(5, 8), self.first.weight)
        elif self.how == "a module with two ways":
            out = self.inner(x) + self.inner(x.cos(), True)
        elif self.how == "a clamp that is not reached":
            out = self.last(self.first(x * 0.1).clamp(0, 6))
        elif self.how == "an output of complex numbers":
            y = self.first(x)
            return torch.stack([self.last(y.relu()).sum().to(torch.complex64), torch.fft.fft(y).sum()])
        return out


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, is_other: bool = False) -> torch.Tensor:
        return x @ self.two if is_other else (x @ self.one).relu() @ self.two


@pytest.mark.parametrize(
    "how",
    [
        "a reader of two norms",
        "a reader that is called once more",
        "a weight that a function uses",
        "a module with two ways",
        "a clamp that is not reached",
        "an output of complex numbers",
    ],
)
def test_what_is_used_once_more_has_none(how: str) -> None:
    torch.manual_seed(0)
    assert sides(found_in(Twice(how), torch.randn(16, 8))) == {}


def test_parameters_of_the_model_itself_and_outputs_of_other_sizes_are_no_obstacle() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    assert {
        each.parameters[0] for each in hookstats.find_identities(attention, lambda: attention(x, x, x)).identities
    } == {"in_proj_weight"}
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[:, 3:] = True
    assert len(hookstats.find_identities(layer, lambda: layer(x, src_key_padding_mask=padding))) == 3

    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.first(x.view(4, 4, 8)).relu()).view(16, 4) + self.last(
                self.first(x).relu()
            )
            return out

    assert sides(found_in(Sizes(), torch.randn(16, 8))) == {"first.weight + first.bias = last.weight": 12}


def test_tied_parameters_and_weights_of_zero_prove_nothing() -> None:
    torch.manual_seed(0)
    assert not any("head" in each or "embedding" in each for each in sides(found_in(Llama(tied=True), ids())))
    second = nn.Linear(4, 8, bias=False)
    lora = nn.Sequential(nn.Linear(8, 4, bias=False), second)
    nn.init.zeros_(second.weight)
    assert sides(found_in(lora, torch.randn(5, 8))) == {}
    nn.init.normal_(second.weight)
    assert sides(found_in(lora, torch.randn(5, 8))) == {"0.weight = 1.weight": 4}


class Branch(nn.Module):
    """A residual branch that begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def test_a_branch_that_begins_at_0_hides_no_reader() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), Branch(), nn.Linear(16, 4)), torch.randn(6, 8)
    found = hookstats.find_identities(model, lambda: model(x))
    assert "0.weight" not in {name for each in found.identities for name in each.parameters}


def test_norms_that_are_stored_less_one_are_told_by_their_offset() -> None:
    torch.manual_seed(0)
    found = found_in(Llama(offset=1.0), ids())
    assert len(found) == len(found_in(Llama(), ids()))
    offsets = {term.parameter: term.offset for each in found.identities for term in each.left}
    assert offsets["norm.weight"] == 1
    assert offsets["layers.0.mlp.up_proj.weight"] == 0


def test_experts_in_one_tensor_and_multihead_attention_have_theirs_inside() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Parameter(torch.randn(3, 32, 8)), nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = torch.einsum("nd,efd->enf", x, self.gate_up).chunk(2, -1)
            return torch.einsum("enf,edf->nd", F.silu(gate) * up, self.down)

    torch.manual_seed(0)
    assert sides(found_in(nn.Sequential(Experts()), torch.randn(5, 8))) == {"0.gate_up = 0.down": 16}
    encoder = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    found = sides(found_in(encoder, torch.randn(2, 5, 16)))
    projection = "self_attn.in_proj_weight + self_attn.in_proj_bias"
    assert found == {
        "linear1.weight + linear1.bias = linear2.weight": 24,
        f"{projection} = {projection}": 16,  # queries and keys
        f"{projection} = self_attn.out_proj.weight": 16,  # values
    }


@pytest.mark.parametrize("how", ["dropout", "autocast", "bfloat16", "compiled"])
def test_they_are_the_same_however_the_model_runs(how: str) -> None:
    torch.manual_seed(0)
    model = Llama(dropout=0.1 if how == "dropout" else 0.0)
    expected = sides(found_in(Llama(), ids()))
    if how == "bfloat16":
        model.bfloat16()
    if how == "compiled":
        for layer in model.layers:
            layer.compile(backend="eager")

    def forward() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return model(ids())

    assert sides(hookstats.find_identities(model, forward)) == expected


def test_nothing_of_the_model_and_no_random_number_is_another_one_afterwards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(conv_net(), nn.Dropout(0.5)).train()
    monitor = hookstats.attach(model, every=1)
    before = copy.deepcopy(model.state_dict())
    hooks = [len(each._forward_hooks) for each in model.modules()]
    x = torch.randn(2, 3, 14, 14)
    state = torch.get_rng_state()
    assert len(found_in(model, x)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(each._forward_hooks) for each in model.modules()] == hooks
    assert all(each.grad is None for each in model.parameters())
    assert model.training
    snapshot = monitor.snapshot()
    assert snapshot["0.0", "output"].calls == 0  # the monitor has seen none of it


@pytest.mark.parametrize(
    ("model", "forward", "error", "text"),
    [
        ("model", lambda: None, TypeError, "expected a torch.nn.Module, got str"),
        (nn.Linear(2, 2), 3, TypeError, "expected a function that runs the model, got int"),
        (nn.Linear(2, 2), lambda: None, ValueError, "expected the model's outputs, got NoneType"),
    ],
)
def test_other_arguments_are_refused(model: Any, forward: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hookstats.find_identities(model, forward)


def test_a_forward_that_is_another_one_each_time_is_refused() -> None:
    model, count = nn.Linear(4, 4), itertools.count()
    with pytest.raises(ValueError, match="expected the same output, bit for bit, from a second run"):
        hookstats.find_identities(model, lambda: model(torch.full((2, 4), float(next(count)))))


# How many each has at least. More than a hundred others: python -m benchmarks.identities coverage
ZOO = {"llama": 11, "mixtral": 11, "gpt_neox": 8, "glm": 11, "doge": 9, "bloom": 8}
ZOO |= {"vit": 8, "resnet": 3, "encoder of torch.nn": 6}


@pytest.mark.parametrize("name", ZOO)
def test_none_is_wrong_at_other_parameters_and_for_another_loss(name: str) -> None:
    """Gradients of a random loss at parameters that are far from those where identities were found."""
    if name in languages.TYPES:
        model, inputs = languages.make(name).eval(), languages.batch()
        del inputs["labels"]
    else:
        model, inputs = others.made({**others.TUNED, **others.OTHERS}[name])
    found = hookstats.find_identities(model, lambda: model(**inputs))
    torch.manual_seed(5)
    with torch.no_grad():
        for each in model.parameters():
            each += 0.05 * torch.randn_like(each)

    def run() -> None:
        outputs = model(**inputs)
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad]
        torch.stack([(each * torch.randn_like(each)).sum() for each in tensors]).sum().backward()

    checked = found.check(run)
    assert checked.judged >= ZOO[name]
    assert not checked.breaks, checked
