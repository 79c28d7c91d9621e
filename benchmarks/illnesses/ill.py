"""The illnesses: each function breaks one thing of a healthy training."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from benchmarks.illnesses.models import GPT, Around, layers
from benchmarks.illnesses.training import Batch, Setup, adam, by, ill, sgd

IMAGES = ("mlp", "cnn")
ALL = ("mlp", "gpt")
JUMPS = ("loss-spike", "gradient-norm-spike", "exploding-gradients")
DIVERGES = (*JUMPS, "update-ratio", "nonfinite", "outlier-channels")


def linears(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, (nn.Linear, nn.Conv2d))]


def inputs(change: Callable[[int, torch.Tensor], torch.Tensor]) -> Callable[[int, torch.Tensor, torch.Tensor], Batch]:
    return lambda step, x, y: (change(step, x.clone()), y)


def _at(when: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Batch]:
    return inputs(lambda step, x: change(x) if step == when else x)


def _from(when: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Batch]:
    return inputs(lambda step, x: change(x) if step >= when else x)


def always(act: Callable[[int], object]) -> list[Callable[[int], None]]:
    """Acts before each step."""

    def before(number: int) -> None:
        with torch.no_grad():
            act(number)

    return [before]


def when(step: int, act: Callable[[], object]) -> list[Callable[[int], None]]:
    """Acts once, before that step."""
    return always(lambda number: act() if number == step else None)


def drop(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Take parameters out of an optimizer's groups."""
    dropped = set(map(id, parameters))
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) not in dropped]


# Data


@ill("input-shift", on=("mlp", "cnn", "resnet"), began=57)
def a_batch_a_thousand_times_too_large(setup: Setup) -> None:
    setup.damage = _at(57, lambda x: 1000 * x)


def _scale_one(x: torch.Tensor) -> torch.Tensor:
    x[5] *= 1000
    return x


@ill("input-shift", on=("mlp", "cnn", "resnet"), began=57)
def one_image_a_thousand_times_too_large(setup: Setup) -> None:
    setup.damage = _at(57, _scale_one)


@ill("nonfinite", on=IMAGES, where="", began=57)
def a_pixel_that_is_nan(setup: Setup) -> None:
    def spoil(x: torch.Tensor) -> torch.Tensor:
        x.view(len(x), -1)[3, 7] = float("nan")
        return x

    setup.damage = _at(57, spoil)


@ill("nonfinite", on=IMAGES, where="", began=57)
def a_division_by_a_deviation_of_zero_in_the_data(setup: Setup) -> None:
    setup.damage = _at(57, lambda x: (x - x.mean()) / torch.zeros(()))


@ill("constant-input", on=IMAGES)
def images_that_were_not_loaded(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: torch.zeros_like(x))


@ill("constant-input", on=IMAGES, began=50)
def a_loader_that_gives_zeros_from_the_middle_on(setup: Setup) -> None:
    setup.damage = _from(50, torch.zeros_like)


@ill("constant-input", on=IMAGES)
def the_same_image_in_every_row(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: x[:1].expand_as(x).clone())


@ill("constant-input", on=("gpt", "lstm"))
def tokens_that_are_all_padding(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: torch.zeros_like(x))


@ill("unscaled-input", on=("mlp", "cnn"))
def pixels_from_0_to_255(setup: Setup) -> None:
    setup.damage = inputs(lambda step, x: 255 * x)


@ill("unscaled-input", on=("mlp",))
def one_feature_ten_thousand_times_the_others(setup: Setup) -> None:
    def grow(step: int, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :20], 1e4 * x[:, 20:21], x[:, 21:]], 1)

    setup.damage = inputs(grow)


@ill("input-shift", on=IMAGES, began=60)
def a_scaling_that_is_left_out_from_the_middle_on(setup: Setup) -> None:
    setup.damage = _from(60, lambda x: 255 * x)


@ill("input-shift", on=IMAGES, began=60)
def a_mean_that_is_subtracted_twice(setup: Setup) -> None:
    setup.damage = _from(60, lambda x: x - 1.0)


@ill("input-shift", on=IMAGES, began=60)
def a_scaling_that_is_done_twice(setup: Setup) -> None:
    setup.damage = _from(60, lambda x: x / 255)


@ill("input-shift", on=("mlp",), began=45)
def batches_from_a_broken_worker(setup: Setup) -> None:
    """Every tenth batch from step 45 on is a thousand times too small."""
    setup.damage = inputs(lambda step, x: x / 1000 if step >= 45 and step % 10 == 5 else x)


# Labels


@ill("no-progress", on=("mlp", "gpt"))
def labels_of_other_rows(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x, y[torch.randperm(len(y))])


@ill("no-progress", on=("mlp", "cnn"))
def labels_that_are_random(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x, torch.randint(10, y.shape))


@ill("loss-spike", "gradient-norm-spike", on=("mlp", "cnn"), began=80)
def labels_that_are_shifted_by_one_class_from_the_middle_on(setup: Setup) -> None:
    setup.damage = lambda step, x, y: (x, (y + (step >= 80)) % 10)


@ill("loss-spike", "gradient-norm-spike", "exploding-gradients", on=("mlp", "tanh"), began=60)
def targets_that_are_ten_thousand_times_too_large_in_one_batch(setup: Setup) -> None:
    setup.loss = lambda out, y: mse_loss(out.mean(1), y)
    setup.damage = lambda step, x, y: (x, y / 10 * (1e4 if step == 60 else 1))


# Optimizers


@ill("unchanged-parameters", on=("mlp", "cnn", "gpt", "resnet"))
def a_layer_that_no_optimizer_has(setup: Setup) -> None:
    setup.optimizer = setup.make_optimizer(setup.model)
    drop(setup.optimizer, linears(setup.model)[1][1].parameters())


@ill("unchanged-parameters", on=("mlp", "gpt"))
def a_new_head_that_the_optimizer_does_not_know(setup: Setup) -> None:
    setup.optimizer = setup.make_optimizer(setup.model)
    name, head = linears(setup.model)[-1]
    setup.model.set_submodule(name, nn.Linear(head.in_features, head.out_features, head.bias is not None))


@ill("unchanged-parameters", on=ALL)
def the_optimizer_of_another_model(setup: Setup) -> None:
    setup.optimizer = setup.make_optimizer(copy.deepcopy(setup.model))


@ill("unchanged-parameters", on=ALL)
def a_learning_rate_of_zero(setup: Setup) -> None:
    setup.before = [lambda step: setup.set_lr(0.0)]


@ill("unchanged-parameters", on=ALL, began=50)
def a_learning_rate_that_becomes_zero(setup: Setup) -> None:
    setup.before = [lambda step: setup.set_lr(0.0) if step == 50 else None]


@ill("unchanged-parameters", on=("mlp", "cnn"), began=50)
def a_schedule_that_ends_too_early(setup: Setup) -> None:
    lr = 0.03 if setup.kind == "mlp" else 2e-3
    setup.before = [lambda step: setup.set_lr(lr * max(1 - step / 50, 0.0))]


@ill("unchanged-parameters", on=("mlp", "gpt"), began=50)
def a_group_whose_learning_rate_becomes_zero(setup: Setup) -> None:
    setup.optimizer = setup.make_optimizer(setup.model)
    first = [*linears(setup.model)[0][1].parameters()]
    drop(setup.optimizer, first)
    setup.optimizer.add_param_group({"params": first})
    setup.before = [lambda step: setup.set_lr(0.0, group=1) if step == 50 else None]


@ill("unchanged-parameters", on=("mlp", "lstm"))
def a_step_that_is_never_called(setup: Setup) -> None:
    setup.steps_optimizer = lambda step: False


@ill("unchanged-parameters", "missing-gradients", on=("mlp",))
def gradients_that_are_zeroed_before_the_step(setup: Setup) -> None:
    setup.after_backward = lambda step: setup.optimizer.zero_grad(set_to_none=False)


@ill("growing-gradients", on=("mlp", "cnn", "gpt", "lstm"))
def gradients_that_are_never_zeroed_under_adam(setup: Setup) -> None:
    setup.make_optimizer, setup.zeroes = adam(1e-3), False


@ill("growing-gradients", on=("mlp", "resnet"))
def gradients_that_are_never_zeroed_under_sgd(setup: Setup) -> None:
    setup.make_optimizer, setup.zeroes = sgd(1e-3), False


@ill(*DIVERGES, "dead-channels", on=("mlp", "gpt"))
def a_learning_rate_a_hundred_times_too_large(setup: Setup) -> None:
    setup.make_optimizer = sgd(3.0) if setup.kind == "mlp" else adam(0.3)


@ill(*DIVERGES, on=("mlp", "gpt"), began=60)
def a_learning_rate_that_jumps(setup: Setup) -> None:
    setup.before = [lambda step: setup.set_lr(3.0 if setup.kind == "mlp" else 0.3) if step == 60 else None]


@ill(*DIVERGES, on=("mlp", "tanh"))
def an_optimizer_that_maximises(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.03, maximize=True) if setup.kind == "mlp" else adam(1e-3, maximize=True)


@ill("no-progress", "tiny-updates", on=("mlp", "gpt"))
def a_learning_rate_ten_thousand_times_too_small(setup: Setup) -> None:
    setup.before = [lambda step: setup.set_lr(3e-6 if setup.kind == "mlp" else 3e-7)]


@ill("no-progress", "clipped-gradients", on=("mlp", "cnn"))
def gradients_that_are_clipped_to_nearly_nothing(setup: Setup) -> None:
    setup.make_optimizer = sgd(0.03)
    setup.clip(1e-4)


@ill("no-progress", "tiny-updates", on=("tanh", "gpt"))
def an_epsilon_of_adam_that_swallows_the_gradient(setup: Setup) -> None:
    setup.make_optimizer = adam(1e-4, eps=1e3)


@ill("shrinking-weights", on=("mlp", "cnn"))
def weight_decay_that_is_too_strong_in_sgd(setup: Setup) -> None:
    setup.make_optimizer = by(torch.optim.SGD, 0.05, weight_decay=0.5)


@ill("shrinking-weights", on=("mlp", "gpt", "lstm"))
def weight_decay_that_is_too_strong_in_adamw(setup: Setup) -> None:
    setup.make_optimizer = adam(1e-3, weight_decay=50.0)


# Initialisation


@ill("dead-channels", "missing-gradients", on=("mlp", "cnn"))
def weights_that_are_all_zero(setup: Setup) -> None:
    for parameter in setup.model.parameters():
        nn.init.zeros_(parameter)


@ill("initial-loss", "exploding-gradients", "residual-drift", *DIVERGES, on=("mlp", "gpt"))
def initial_weights_thirty_times_too_large(setup: Setup) -> None:
    with torch.no_grad():
        for _, layer in linears(setup.model):
            layer.weight *= 30


@ill("saturated-channels", "vanishing-gradients", on=("tanh",))
def tanh_that_is_saturated_from_the_start(setup: Setup) -> None:
    with torch.no_grad():
        for _, layer in linears(setup.model)[:3]:
            layer.weight *= 30


@ill("vanishing-gradients", on=("mlp",))
def a_deep_stack_of_sigmoids(setup: Setup) -> None:
    setup.model = layers(*[64] * 13, 10, activation=nn.Sigmoid)


@ill("dead-channels", where={"mlp": "1", "cnn": "1"}, on=("mlp", "cnn"))
def a_dead_first_layer(setup: Setup) -> None:
    with torch.no_grad():
        linears(setup.model)[0][1].bias.fill_(-20)


@ill("dead-channels", where={"mlp": "3"}, on=("mlp",), began=40)
def a_layer_that_dies_in_the_middle(setup: Setup) -> None:
    setup.before = when(40, lambda: setup.model[2].bias.fill_(-50))


@ill("dead-channels", "missing-gradients", "vanishing-gradients", on=("resnet",))
def batch_norms_whose_weights_are_zero_everywhere(setup: Setup) -> None:
    for module in setup.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.zeros_(module.weight)
            module.weight.requires_grad_(False)


# Architecture


@ill("missing-gradients", on=("mlp", "cnn"))
def a_detach_in_the_forward(setup: Setup) -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(model.children()):
            x = layer(x).detach() if place == 3 else layer(x)
        return x

    setup.model = Around(setup.model, forward)


@ill("missing-gradients", on=("gpt",), where="blocks.0")
def a_block_under_no_grad(setup: Setup) -> None:
    block = setup.model.blocks[0]
    inner = block.forward
    block.forward = torch.no_grad()(inner)


@ill("probabilities-as-logits", on=("mlp", "cnn", "tanh"))
def a_softmax_before_the_cross_entropy(setup: Setup) -> None:
    setup.model.append(nn.Softmax(-1))


@ill("probabilities-as-logits", on=("gpt",))
def a_softmax_module_before_the_cross_entropy(setup: Setup) -> None:
    setup.model.head = nn.Sequential(setup.model.head, nn.Softmax(-1))


@ill("no-progress", "vanishing-gradients", "constant-input", "heavy-dropout", on=("mlp",))
def a_bottleneck_of_dropout(setup: Setup) -> None:
    setup.model.insert(4, nn.Dropout(0.999))


@ill("residual-drift", "exploding-gradients", *DIVERGES, on=("gpt",))
def a_residual_stream_that_grows_in_each_block(setup: Setup) -> None:
    setup.model = GPT(depth=6)
    for block in setup.model.blocks:
        block.norm1, block.norm2 = nn.Identity(), nn.Identity()
        with torch.no_grad():
            block.mlp[2].weight *= 8


@ill("exploding-gradients", on=("mlp",))
def a_deep_stack_without_norms_and_with_large_weights(setup: Setup) -> None:
    setup.model = layers(*[64] * 13, 10)
    with torch.no_grad():
        for layer in setup.model[::2]:
            nn.init.orthogonal_(layer.weight, 8.0)
    setup.make_optimizer = sgd(1e-12)


@ill("missing-gradients", on=("mlp",))
def an_argmax_on_the_way(setup: Setup) -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = model[:4](x)
        return model[4:](one_hot(x.argmax(-1), 64).float())

    setup.model = Around(setup.model, forward)


# Precision


@ill("lost-updates", on=("mlp", "gpt", "lstm"))
def bfloat16_weights_whose_updates_are_lost(setup: Setup) -> None:
    setup.cast(torch.bfloat16)
    setup.make_optimizer = adam(1e-6)


@ill("nonfinite", on=("mlp",))
def float16_that_overflows(setup: Setup) -> None:
    with torch.no_grad():
        setup.model[0].weight *= 100
        setup.model[2].weight *= 300
        setup.model[4].weight *= 300
    setup.cast(torch.float16)
    setup.loss = lambda out, y: cross_entropy(out.float(), y)


@ill("vanishing-gradients", "missing-gradients", "unchanged-parameters", on=("mlp",))
def float16_gradients_that_underflow(setup: Setup) -> None:
    setup.cast(torch.float16)
    setup.loss = lambda out, y: 1e-6 * cross_entropy(out.float(), y)


# Accidents


@ill(*DIVERGES, on=("mlp", "cnn"), began=70)
def a_bit_of_a_weight_that_flips(setup: Setup) -> None:
    setup.before = when(70, lambda: linears(setup.model)[1][1].weight.view(-1)[17].fill_(2.0**20))


@ill("nonfinite", on=("mlp", "gpt"), began=70)
def a_weight_that_becomes_nan(setup: Setup) -> None:
    setup.before = when(70, lambda: linears(setup.model)[1][1].weight.view(-1)[17].fill_(float("nan")))


@ill("loss-spike", "gradient-norm-spike", on=("mlp", "gpt"), began=90)
def weights_that_are_made_anew_in_the_middle(setup: Setup) -> None:
    def anew() -> None:
        for module in setup.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    setup.before = when(90, anew)


@ill("nonfinite", on=("mlp", "tanh"), began=60)
def a_logarithm_of_zero_in_the_loss(setup: Setup) -> None:
    inner, calls = setup.loss, itertools.count()
    setup.loss = lambda out, y: inner(out, y) + ((out.sum() * 0).log() if next(calls) == 60 else out.sum() * 0)


@ill(*DIVERGES, on=("mlp", "gpt"), began=60)
def a_loss_that_is_multiplied_by_a_thousand(setup: Setup) -> None:
    inner, calls = setup.loss, itertools.count()
    setup.make_optimizer = sgd(0.03)
    setup.loss = lambda out, y: inner(out, y) * (1000.0 if next(calls) >= 60 else 1.0)
