"""More illnesses: all of them belong to the half by which no threshold was set."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.illnesses.ill import DIVERGES, JUMPS, always, inputs, linears, when
from benchmarks.illnesses.models import Function
from benchmarks.illnesses.training import Setup, by, ill, sgd

SECOND = {"mlp": "2", "tanh": "2", "cnn": "3", "resnet": "1.conv1", "gpt": "blocks.0.proj"}  # a layer of each kind


def _second(setup: Setup) -> Any:
    return setup.model.get_submodule(SECOND[setup.kind])


# Data


@ill("no-progress", on=("mlp", "tanh"))
def the_axis_of_the_batch_taken_for_that_of_the_features(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: x.t().contiguous())


@ill("nonfinite", on=("cnn", "resnet"), where="", began=57)
def a_pixel_that_is_infinite(setup: Setup) -> None:
    def spoil(step: int, x: torch.Tensor) -> torch.Tensor:
        if step == 57:
            x.view(len(x), -1)[7, 20] = float("inf")
        return x

    setup.damage = inputs(spoil)


@ill("input-shift", on=("mlp", "cnn"), began=60)
def images_whose_sign_turns_in_the_middle(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: -x if step >= 60 else x)


@ill("input-shift", *JUMPS, on=("mlp", "cnn"), began=60)
def images_that_are_inverted_in_the_middle(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: 1 - x if step >= 60 else x)


@ill("input-shift", on=("mlp", "resnet"), began=70)
def noise_in_place_of_one_batch(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: 10 * torch.randn_like(x) if step == 70 else x)


@ill("input-shift", on=("mlp", "cnn"), began=61)
def a_fill_value_of_missing_pixels(setup: Setup) -> None:
    def spoil(step: int, x: torch.Tensor) -> torch.Tensor:
        if step == 61:
            x.view(len(x), -1)[3:7, 12] = -1e20
        return x

    setup.damage = inputs(spoil)


@ill("constant-input", *JUMPS, on=("gpt", "lstm"), began=60)
def tokens_that_are_one_from_the_middle_on(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: torch.zeros_like(x) if step >= 60 else x)


# Labels and losses


@ill(*JUMPS, on=("mlp", "gpt"), began=80)
def labels_that_are_random_from_the_middle_on(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x, y.flatten()[torch.randperm(y.numel())].view_as(y) if step >= 80 else y)


@ill(*DIVERGES, "no-progress", "unscaled-targets", on=("mlp", "tanh"))
def targets_that_were_never_scaled(setup: Setup) -> None:
    setup.loss = lambda out, y: mse_loss(out.mean(1), 1e4 * y)


@ill("nonfinite", on=("mlp", "gpt"), began=60)
def targets_that_are_all_to_be_ignored(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x, torch.full_like(y, -100) if step == 60 else y)


@ill(*DIVERGES, on=("mlp", "cnn"), began=60)
def a_loss_whose_sign_turns(setup: Setup) -> None:
    inner, calls = setup.loss, itertools.count()
    setup.loss = lambda out, y: inner(out, y) * (-1 if next(calls) >= 60 else 1)


# Optimizers and schedules


@ill("unchanged-parameters", on=("mlp", "gpt"))
def an_optimizer_of_biases_alone(setup: Setup) -> None:
    setup.make_optimizer = lambda model: torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], 1e-3)


@ill("unchanged-parameters", "missing-gradients", on=("mlp", "cnn", "gpt"), where=SECOND, began=40)
def a_weight_that_is_replaced_after_the_optimizer_was_made(setup: Setup) -> None:
    layer = _second(setup)
    setup.before = when(40, lambda: setattr(layer, "weight", nn.Parameter(layer.weight.detach().clone())))


@ill("unchanged-parameters", "missing-gradients", "no-progress", on=("mlp", "resnet"))
def gradients_that_are_clipped_to_a_norm_of_zero(setup: Setup) -> None:
    setup.clip(0.0)


@ill(*DIVERGES, on=("mlp", "lstm"))
def a_decay_of_weights_of_the_wrong_sign(setup: Setup) -> None:
    setup.before = always(lambda step: [each.mul_(1.05) for each in setup.model.parameters()])


@ill("shrinking-weights", on=("mlp", "cnn"))
def a_decay_of_weights_by_hand_that_forgets_the_learning_rate(setup: Setup) -> None:
    setup.before = always(lambda step: [each.mul_(0.95) for each in setup.model.parameters()])


@ill(*DIVERGES, "no-progress", on=("mlp", "resnet"))
def a_momentum_that_forgets_nothing(setup: Setup) -> None:
    setup.make_optimizer = by(torch.optim.SGD, 0.1, momentum=0.9999)


@ill("unchanged-parameters", "lost-updates", "tiny-updates", on=("mlp", "cnn", "gpt"), began=25)
def a_schedule_of_epochs_that_is_stepped_at_each_batch(setup: Setup) -> None:
    """The learning rate is halved at each step: from about the 25th on, float32 weights no longer change."""
    lr = 0.03 if setup.kind == "mlp" else 2e-3
    setup.before = [lambda step: setup.set_lr(lr * 0.5**step)]


@ill("nonfinite", "unchanged-parameters", on=("mlp", "tanh"))
def a_scaler_that_skips_every_step(setup: Setup) -> None:
    inner = setup.loss
    setup.loss = lambda out, y: inner(out, y) * 1e38 * 1e38
    setup.steps_optimizer = lambda step: False


@ill("bias-gradient", on=("mlp", "cnn", "gpt"), where=SECOND | {"gpt": "blocks.0.qkv"}, began=40)
def gradients_of_one_layer_times_eight(setup: Setup) -> None:
    layer = setup.model.get_submodule("blocks.0.qkv") if setup.kind == "gpt" else _second(setup)

    def multiply(step: int) -> None:
        if step >= 40:
            for each in layer.parameters():
                each.grad.mul_(8)

    setup.after_backward = multiply


@ill("growing-gradients", on=("mlp", "gpt"), where=SECOND)
def one_layer_whose_gradients_are_never_zeroed(setup: Setup) -> None:
    setup.zeroes = False
    if setup.kind == "mlp":
        setup.make_optimizer = sgd(1e-3)
    layer = _second(setup)
    kept = {id(each) for each in layer.parameters()}

    def zero(step: int) -> None:
        for each in setup.model.parameters():
            if id(each) not in kept:
                each.grad = None

    setup.before = [zero]


# Initialisation


@ill("initial-loss", *DIVERGES, on=("mlp", "cnn"))
def one_layer_a_thousand_times_too_large(setup: Setup) -> None:
    with torch.no_grad():
        _second(setup).weight.mul_(1000)


@ill("no-progress", "vanishing-gradients", "equal-channels", on=("mlp", "tanh"))
def weights_that_are_all_the_same(setup: Setup) -> None:
    for each in setup.model.parameters():
        nn.init.constant_(each, 0.01)


@ill("no-progress", "vanishing-gradients", on=("mlp", "tanh"))
def weights_a_hundred_times_too_small(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.03)
    with torch.no_grad():
        for _, layer in linears(setup.model):
            layer.weight.mul_(0.01)


@ill("initial-loss", *DIVERGES, on=("lstm", "gpt"))
def a_head_a_thousand_times_too_large(setup: Setup) -> None:
    with torch.no_grad():
        setup.model.head.weight.mul_(1000)


# Architecture


@ill("probabilities-as-logits", on=("mlp", "cnn"))
def a_softmax_over_the_axis_of_the_batch(setup: Setup) -> None:
    setup.model.append(nn.Softmax(0))


@ill("probabilities-as-logits", on=("mlp", "cnn"))
def a_sigmoid_before_the_cross_entropy(setup: Setup) -> None:
    setup.model.append(nn.Sigmoid())


@ill("missing-gradients", "unchanged-parameters", on=("gpt", "lstm"), where="tokens")
def an_embedding_whose_output_is_detached(setup: Setup) -> None:
    tokens = setup.model.tokens
    inner = tokens.forward
    tokens.forward = lambda ids: inner(ids).detach().requires_grad_()


@ill("missing-gradients", "vanishing-gradients", "unchanged-parameters", on=("mlp", "cnn"))
def a_rounding_on_the_way(setup: Setup) -> None:
    setup.model.insert(4, Function(torch.round))


def _spoil_output(module: nn.Module, calls_before: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    calls, inner = itertools.count(), module.forward

    @functools.wraps(inner)
    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        out = inner(*inputs)
        return change(out) if next(calls) >= calls_before else out

    module.forward = forward


@ill("dead-channels", "missing-gradients", *JUMPS, on=("mlp", "cnn"), began=50)
def a_mask_that_becomes_all_zero(setup: Setup) -> None:
    _spoil_output(_second(setup), 50, lambda out: out * 0)


@ill("nonfinite", on=("gpt",), where="blocks.0.proj", began=60)
def a_row_of_attention_that_is_masked_altogether(setup: Setup) -> None:
    def mask(out: torch.Tensor) -> torch.Tensor:
        masked = torch.zeros_like(out)
        masked[2, 5] = float("-inf")
        return out + masked.softmax(-1) * 0

    _spoil_output(_second(setup), 60, mask)


@ill("nonfinite", on=("mlp", "cnn"), where=SECOND, began=60)
def a_norm_that_divides_by_zero(setup: Setup) -> None:
    _spoil_output(_second(setup), 60, lambda out: out / (out - out).norm())


# Precision


@ill("lost-updates", on=("mlp", "cnn"))
def bfloat16_weights_under_sgd(setup: Setup) -> None:
    setup.cast(torch.bfloat16)
    setup.make_optimizer = sgd(1e-6)


@ill(*DIVERGES, on=("mlp", "tanh"))
def float16_weights_under_adam_whose_epsilon_is_zero_there(setup: Setup) -> None:
    setup.cast(torch.float16)
    setup.make_optimizer = by(torch.optim.Adam, 1e-3, foreach=False)
    setup.loss = lambda out, y: cross_entropy(out.float(), y)


@ill("nonfinite", on=("mlp", "tanh"))
def a_scale_of_the_loss_that_never_falls(setup: Setup) -> None:
    setup.cast(torch.float16)
    setup.loss = lambda out, y: cross_entropy(out.float(), y) * 2.0**24


# Accidents


@ill(*JUMPS, on=("mlp", "cnn"), where=SECOND, began=70)
def a_gradient_that_is_reduced_wrongly_once(setup: Setup) -> None:
    def spoil(step: int) -> None:
        if step == 70:
            _second(setup).weight.grad.mul_(1e4)

    setup.after_backward = spoil


@ill("nonfinite", on=("mlp", "gpt"), where=SECOND, began=70)
def a_gradient_that_is_nan_in_one_layer(setup: Setup) -> None:
    def spoil(step: int) -> None:
        if step == 70:
            _second(setup).weight.grad.view(-1)[3] = float("nan")

    setup.after_backward = spoil


@ill(*JUMPS, "dead-channels", "missing-gradients", on=("mlp", "cnn"), began=70)
def a_layer_that_is_overwritten_with_zeros(setup: Setup) -> None:
    setup.before = when(70, lambda: [each.zero_() for each in _second(setup).parameters()])


@ill(*DIVERGES, on=("mlp", "resnet"), began=70)
def a_momentum_that_is_read_wrongly_from_a_checkpoint(setup: Setup) -> None:
    def spoil() -> None:
        for state in setup.optimizer.state.values():
            state["momentum_buffer"].mul_(1e3)

    setup.before = when(70, spoil)


@ill(*JUMPS, on=("mlp", "gpt"), began=80)
def two_layers_that_are_exchanged(setup: Setup) -> None:
    names = ("4", "2") if setup.kind == "mlp" else ("blocks.1", "blocks.0")

    def exchange() -> None:
        one, other = (list(setup.model.get_submodule(name).parameters()) for name in names)
        for mine, its in zip(one, other, strict=True):
            kept = mine.clone()
            mine.copy_(its)
            its.copy_(kept)

    setup.before = when(80, exchange)


@ill(*DIVERGES, on=("mlp", "gpt"), began=60)
def memory_that_adds_noise_to_the_weights(setup: Setup) -> None:
    def spoil(step: int) -> None:
        if step >= 60:
            for each in setup.model.parameters():
                each.add_(0.3 * torch.randn_like(each))

    setup.before = always(spoil)


@ill("unscaled-input", "input-shift", *DIVERGES, on=("mlp", "tanh"))
def an_identifier_among_the_features(setup: Setup) -> None:
    def add(step: int, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 1e6 + 64.0 * step + torch.arange(len(x))
        return x

    setup.damage = inputs(add)
