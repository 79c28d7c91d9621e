"""More mistakes that people have described in public, each beside its healthy twin: in the seen half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss

from benchmarks.illnesses.models import Function, Recurrent, layers
from benchmarks.illnesses.public_mistakes import in_microbatches, regression, with_two_losses
from benchmarks.illnesses.training import Setup, by, healthy, ill, sgd

# Data


@ill("input-shift", on=("mlp", "cnn"), began=57)
def one_batch_of_zeros(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x * (step != 57), y)


@healthy("lstm")
def a_state_that_begins_at_zero_now_and_then(setup: Setup) -> None:
    """The state is an input of the model, and 0 at the beginning of each text."""
    state: Any = None

    def loss_of(number: int) -> torch.Tensor:
        nonlocal state
        x, y = setup.data(number)
        if number % 15 == 0:
            state = (torch.zeros(1, len(x), 48), torch.zeros(1, len(x), 48))
        out, state = setup.model(x, state)
        state = tuple(each.detach() for each in state)
        return setup.loss(out, y)

    setup.model, setup.loss_of = Recurrent(nn.LSTM), loss_of


@ill("unscaled-input", on=("mlp", "cnn"))
def pixels_that_are_divided_by_255_twice(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x / 255, y)


class _Masked(nn.Module):
    """Attention over the 16 patches of an image; the mask is added to its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.qkv, self.head = nn.Linear(4, 32), nn.Linear(32, 96), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.inside(x.view(-1, 16, 4))).chunk(3, -1)
        return self.head(((q @ k.mT / 32**0.5 + mask).softmax(-1) @ v).mean(1))


@healthy("mlp")
def a_mask_of_the_smallest_number(setup: Setup) -> None:
    """It is an input of the model, and not always the same."""
    setup.model = _Masked()

    def loss_of(number: int) -> torch.Tensor:
        x, y = setup.data(number)
        mask = torch.full((16, 16), torch.finfo(torch.float32).min).triu(1 + number % 3)
        return setup.loss(setup.model(x, mask), y)

    setup.loss_of = loss_of


@ill("constant-input", on=("mlp", "cnn"))
def a_loader_that_gives_one_batch(setup: Setup) -> None:
    batch = setup.data(0)
    setup.data = lambda step: batch


# Values that are not finite


def _standardised(setup: Setup, eps: float) -> None:
    """Each row by its deviation; one of step 60 holds one value."""

    def by_row(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + eps)

    setup.model = nn.Sequential(nn.Linear(64, 64, bias=False), Function(by_row), *layers(64, 64, 10))

    def damage(step: int, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone()
        x[5] *= step != 60
        return x, y

    setup.damage = damage


@ill("nonfinite", on=("mlp",), where="1", began=60)
def a_row_that_is_divided_by_zero(setup: Setup) -> None:
    _standardised(setup, 0.0)


@healthy("mlp")
def a_row_that_is_divided_by_nearly_zero(setup: Setup) -> None:
    _standardised(setup, 1e-5)


@ill("nonfinite", on=("mlp",))
def a_logarithm_behind_a_relu(setup: Setup) -> None:
    """From the first step on, where no mask would be."""
    setup.model = nn.Sequential(*setup.model, nn.ReLU(), Function(torch.log))
    setup.loss = nll_loss


@healthy("mlp")
def a_logarithm_of_what_is_clamped(setup: Setup) -> None:
    setup.model = nn.Sequential(*setup.model, nn.Softmax(-1), Function(lambda x: x.clamp(1e-6).log()))
    setup.loss = nll_loss


@ill("outlier-channels", on=("gpt",))
def a_channel_that_is_enormous_in_every_block(setup: Setup) -> None:
    """Scale a channel of the residual stream, which runs through all blocks."""
    with torch.no_grad():
        setup.model.tokens.weight[:, 3] = 1e3


# What does not learn


class _Gated(nn.Module):
    def __init__(self, gate: Callable[[], float]) -> None:
        super().__init__()
        self.body, self.branch, self.head = layers(64, 64), layers(64, 64, 64), nn.Linear(64, 10)
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).relu()
        return self.head(hidden + self.gate() * self.branch(hidden))


@ill("missing-gradients", on=("mlp",), where="branch")
def a_branch_whose_gate_is_zero(setup: Setup) -> None:
    """Its parameters get gradients, and these are 0 in every step."""
    setup.model = _Gated(lambda: 0.0)


@healthy("mlp")
def a_branch_whose_gate_opens_slowly(setup: Setup) -> None:
    calls = [0]

    def gate() -> float:
        calls[0] += 1
        return min(calls[0] / 50, 1.0)

    setup.model = _Gated(gate)


@healthy("mlp")
def a_head_that_is_multiplied_by_zero(setup: Setup) -> None:
    """Give every parameter a gradient, as some reductions over ranks require."""
    with_two_losses(setup, lambda step: 0.0)


@healthy("mlp")
def a_loss_that_is_added_later(setup: Setup) -> None:
    with_two_losses(setup, lambda step: float(step >= 60))


class _Mixture(nn.Module):
    """Each row goes to one of eight experts."""

    def __init__(self, bias: float, balance: float) -> None:
        super().__init__()
        self.body, self.router = layers(64, 32), nn.Linear(32, 8)
        self.experts, self.head = nn.ModuleList(nn.Linear(32, 32) for _ in range(8)), nn.Linear(32, 10)
        self.balance = balance
        with torch.no_grad():
            self.router.bias[0] += bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).relu()
        weights = self.router(hidden).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(hidden)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_copy(0, rows, weights[rows, i : i + 1] * expert(hidden[rows]))
        shares = torch.stack([(chosen == i).float().mean() for i in range(8)])
        return self.head(hidden + out), self.balance * 8 * (shares * weights.mean(0)).sum()


def _mixed(setup: Setup, bias: float, balance: float) -> None:
    setup.model = _Mixture(bias, balance)
    setup.make_optimizer = sgd(0.03)
    setup.loss = lambda out, y: cross_entropy(out[0], y) + out[1]


@ill("expert-load", on=("mlp",), where="experts")
def a_router_that_chooses_one_expert(setup: Setup) -> None:
    _mixed(setup, 10.0, 0.0)


@healthy("mlp")
def a_router_that_is_balanced(setup: Setup) -> None:
    _mixed(setup, 0.0, 0.1)


# Targets


def _squared(setup: Setup, target: Callable[[torch.Tensor], torch.Tensor], *last: nn.Module) -> None:
    regression(setup)
    setup.model.extend(last)
    setup.loss = lambda out, y: mse_loss(out, target(y.float())[:, None])


@ill("unscaled-targets", on=("mlp",))
def prices_of_a_hundred_thousand_and_more(setup: Setup) -> None:
    _squared(setup, lambda y: 1e5 * (1 + y))


@healthy("mlp")
def prices_that_are_divided_by_their_size(setup: Setup) -> None:
    _squared(setup, lambda y: (1 + y) / 5)


@healthy("mlp")
def answers_that_begin_at_zero(setup: Setup) -> None:
    _squared(setup, lambda y: (y - 4.5) / 3)
    nn.init.zeros_(setup.model[-1].weight)
    nn.init.zeros_(setup.model[-1].bias)


@ill("unreachable-targets", on=("mlp",))
def a_relu_before_targets_of_both_signs(setup: Setup) -> None:
    _squared(setup, lambda y: (y - 4.5) / 3, nn.ReLU())


@ill("unreachable-targets", on=("mlp",))
def a_sigmoid_before_targets_up_to_nine(setup: Setup) -> None:
    _squared(setup, lambda y: y, nn.Sigmoid())


@ill("unreachable-targets", on=("mlp",))
def a_tanh_before_targets_down_to_minus_nine(setup: Setup) -> None:
    _squared(setup, lambda y: -y, nn.Tanh())


@healthy("mlp")
def a_relu_before_targets_that_are_never_negative(setup: Setup) -> None:
    _squared(setup, lambda y: 0.5 + y / 5, nn.ReLU())
    setup.make_optimizer = sgd(0.01)


@healthy("mlp")
def a_sigmoid_before_targets_of_zero_and_one(setup: Setup) -> None:
    _squared(setup, lambda y: (y > 4).float(), nn.Sigmoid())


@healthy("mlp")
def a_tanh_before_targets_of_minus_one_and_one(setup: Setup) -> None:
    _squared(setup, lambda y: 2 * (y > 4).float() - 1, nn.Tanh())


@ill("absent-class", on=("mlp", "cnn"))
def labels_that_are_divided_and_cut_off(setup: Setup) -> None:
    """Images become numbers in [0, 1]; masks that pass through the same conversion are 0 as integers."""
    setup.damage = lambda step, x, y: (x, (y / 255).long())


# The optimizer


@ill("dropped-gradients", on=("mlp", "gpt"))
def microbatches_each_of_which_is_zeroed(setup: Setup) -> None:
    """Eight, of which the optimizer takes the last one."""
    setup.make_optimizer = sgd(0.03)
    in_microbatches(setup, zeroes=True)


@healthy("tanh")
def a_derivative_in_the_loss(setup: Setup) -> None:
    """The gradient by the input is asked for first, and never meant for the parameters."""

    def loss_of(number: int) -> torch.Tensor:
        x, y = setup.data(number)
        x.requires_grad_()
        out = setup.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return cross_entropy(out, y) + 0.01 * slope.square().mean()

    setup.loss_of = loss_of


@ill("lost-moments", on=("mlp", "gpt"))
def an_optimizer_that_is_made_in_each_step(setup: Setup) -> None:
    setup.make_optimizer = by(torch.optim.Adam, 1e-3)
    setup.before = [lambda step: setattr(setup, "optimizer", setup.make_optimizer(setup.model))]


@healthy("mlp")
def one_batch_by_adam(setup: Setup) -> None:
    """All of the data in each step, so the gradient hardly changes."""
    setup.make_optimizer = by(torch.optim.Adam, 1e-4)
    whole = setup.data(0)
    setup.damage = lambda step, x, y: whole
