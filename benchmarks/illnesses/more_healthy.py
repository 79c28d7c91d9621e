"""More healthy trainings: all of them belong to the half by which no threshold was set."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, multi_margin_loss, one_hot

from benchmarks.illnesses.models import layers
from benchmarks.illnesses.training import Batch, Setup, adam, by, healthy, sgd


@healthy("gpt", "lstm")
def gradients_that_are_clipped_to_one(setup: Setup) -> None:
    setup.clip(1.0)


@healthy("mlp", "gpt")
def a_cosine_that_ends_at_zero(setup: Setup) -> None:
    lr = 3e-3 if setup.kind == "gpt" else 0.03
    setup.before = [lambda step: setup.set_lr(lr * 0.5 * (1 + math.cos(math.pi * step / (setup.steps - 1))))]


@healthy("resnet")
def one_cycle(setup: Setup) -> None:
    setup.before = [lambda step: setup.set_lr(0.2 * min(step / 40, (setup.steps - step) / 90))]


@healthy("cnn")
def a_learning_rate_in_stairs(setup: Setup) -> None:
    setup.before = [lambda step: setup.set_lr(2e-3 * 0.1 ** (step // 50))]


@healthy("resnet")
def images_that_are_standardised(setup: Setup) -> None:
    setup.damage = lambda step, x, y: ((x - 0.3) / 0.37, y)


@healthy("cnn")
def batches_of_changing_size(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x[: 8 + step % 7 * 8], y[: 8 + step % 7 * 8])


@healthy("mlp")
def inputs_that_are_mostly_zero(setup: Setup) -> None:
    setup.make_optimizer = adam(3e-3)
    setup.damage = lambda step, x, y: (x * (torch.rand_like(x) > 0.5), y)


@healthy("mlp")
def columns_that_are_left_out_batch_by_batch(setup: Setup) -> None:
    """Half of them: some batches are much harder than others."""
    setup.make_optimizer = adam(3e-3)
    setup.damage = lambda step, x, y: (x * (torch.rand(64) > 0.5), y)


@healthy("mlp")
def features_that_are_never_set(setup: Setup) -> None:
    """A third of the columns is zero for ever."""
    setup.damage = lambda step, x, y: (x * (torch.arange(64) >= 21), y)


@healthy("cnn")
def images_that_are_mixed(setup: Setup) -> None:
    def mix(step: int, x: torch.Tensor, y: torch.Tensor) -> Batch:
        share, other = torch.rand(()), torch.randperm(len(x))
        targets = one_hot(y, 10).float()
        return share * x + (1 - share) * x[other], share * targets + (1 - share) * targets[other]

    setup.damage = mix


@healthy("mlp")
def labels_a_tenth_of_which_is_wrong(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x, torch.where(torch.rand(len(y)) < 0.1, torch.randint(10, y.shape), y))


@healthy("mlp")
def two_classes_that_are_rare(setup: Setup) -> None:
    def rare(step: int, x: torch.Tensor, y: torch.Tensor) -> Batch:
        kept = (y < 8) | (torch.rand(len(y)) < 0.05)
        return x[kept], y[kept]

    setup.damage = rare


@healthy("mlp")
def a_sigmoid_for_each_class(setup: Setup) -> None:
    setup.make_optimizer = adam(3e-3)
    setup.loss = lambda out, y: binary_cross_entropy_with_logits(out, one_hot(y, 10).float())


@healthy("tanh")
def a_margin(setup: Setup) -> None:
    setup.loss = multi_margin_loss


@healthy("gpt")
def a_head_that_shares_the_embedding(setup: Setup) -> None:
    setup.model.tokens = nn.Embedding(128, 32)
    nn.init.normal_(setup.model.tokens.weight, std=0.02)
    setup.model.head.weight = setup.model.tokens.weight


@healthy("gpt")
def an_embedding_that_is_frozen_on_purpose(setup: Setup) -> None:
    setup.model.places.requires_grad_(False)


@healthy("lstm")
def no_weight_decay_and_a_root_of_mean_squares(setup: Setup) -> None:
    setup.make_optimizer = by(torch.optim.RMSprop, 3e-3)


@healthy("mlp", "cnn")
def momentum_of_nesterov(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.03, nesterov=True)


@healthy("gpt")
def a_tenth_of_the_learning_rate_for_the_body(setup: Setup) -> None:
    head = {id(each) for each in setup.model.get_submodule("head").parameters()}
    setup.make_optimizer = lambda model: torch.optim.AdamW(
        [
            {"params": [each for each in model.parameters() if id(each) not in head], "lr": 1e-3},
            {"params": [each for each in model.parameters() if id(each) in head], "lr": 1e-2},
        ]
    )


@healthy("mlp")
def the_head_first_and_then_the_body(setup: Setup) -> None:
    *first, _ = setup.model.children()
    body = [each for layer in first for each in layer.parameters()]

    def unfreeze(step: int) -> None:
        for each in body:
            each.requires_grad_(step >= 30)

    setup.before = [unfreeze]


@healthy("mlp")
def dropout_of_a_half(setup: Setup) -> None:
    setup.model = nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


class _Deep(nn.Module):
    """Each of its blocks is left out at random."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), layers(64, 64, 64)) for _ in range(depth))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.7:
                x = x + block(x)
        return self.head(x)


@healthy("mlp")
def stochastic_depth(setup: Setup) -> None:
    setup.model, setup.make_optimizer = _Deep(), adam(1e-3)


@healthy("resnet")
def branches_that_begin_at_zero(setup: Setup) -> None:
    """The last norm of each branch has weights of zero, as in the recipe of Goyal et al., 2017."""
    setup.make_optimizer = sgd(0.1)
    for name, parameter in setup.model.named_parameters():
        if name.endswith("norm2.weight"):
            nn.init.zeros_(parameter)


@healthy("mlp")
def a_last_layer_that_begins_at_zero(setup: Setup) -> None:
    for each in list(setup.model.children())[-1].parameters():
        nn.init.zeros_(each)


@healthy("mlp")
def a_weight_that_is_normalised(setup: Setup) -> None:
    nn.utils.parametrizations.weight_norm(setup.model.get_submodule("2"))


@healthy("cnn")
def bfloat16_by_autocast(setup: Setup) -> None:
    inner = setup.model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = inner(x)
        return y.float()

    setup.model.forward = forward


@healthy("mlp")
def bfloat16_weights_with_large_steps(setup: Setup) -> None:
    setup.cast(torch.bfloat16)


@healthy("tanh")
def weights_that_are_averaged_beside(setup: Setup) -> None:
    averaged = copy.deepcopy(setup.model).requires_grad_(False)

    def average(step: int) -> None:
        for mine, its in zip(averaged.parameters(), setup.model.parameters(), strict=True):
            mine.data.lerp_(its.data, 0.05)

    setup.before = [average]


@healthy("mlp")
def labels_as_probabilities_of_a_teacher(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x, 0.8 * one_hot(y, 10).float() + 0.02)
    setup.loss = cross_entropy
