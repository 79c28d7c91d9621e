"""Edits: what they do to values and gradients, in which order, and that they leave no trace. Against plain hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import hookstats
from hookstats import edit
from tests.conftest import DEVICES
from tests.models import Containers, Residual, images, small_cnn
from tests.tools.edits import assert_close, clip_to, compile_with, differ, residual, run, scale_by, zero_below

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning"),
]

# In the graphs of older ones, what has a gradient hook must not be changed in place, and several hooks of one gradient
# run in the reverse order.
OLD = torch.__version__ < (2, 13)
NOT_OLD = pytest.mark.skipif(OLD, reason="needs torch 2.13")


class Plain:
    """The same edits made with PyTorch's own module hooks, which work on these models: nothing in them is in place."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.fn = fn
        self.changed = 0

    def change(self, old: torch.Tensor) -> torch.Tensor:
        new = self.fn(old)
        self.changed += int((new.detach() != old.detach()).sum())
        return new

    def hang(self, module: nn.Module, tensor: str) -> None:
        if tensor == "output":
            module.register_forward_hook(lambda m, args, output: self.change(output))
        elif tensor == "input":
            module.register_forward_pre_hook(lambda m, args: (self.change(args[0]),))
        elif tensor == "grad_output":
            module.register_full_backward_pre_hook(lambda m, grads: (self.change(grads[0]),))
        else:
            module.register_full_backward_hook(lambda m, grads, _: (self.change(grads[0]),))


EDITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clip": clip_to(-0.05, 0.1),
    "clip above": clip_to(None, 0.1),
    "scale": scale_by(0.3),
    "mask": zero_below(0.2),
    "sine": torch.sin,
}
CASES = [
    ("clip", "grad_output"),
    ("clip", "grad_input"),
    ("clip above", "grad_output"),
    ("scale", "grad_output"),
    ("scale", "grad_input"),
    ("mask", "output"),
    ("mask", "input"),
    ("sine", "output"),
    ("sine", "input"),
    ("sine", "grad_output"),
    ("sine", "grad_input"),
]
WHERE = ["blocks.1", "blocks.?.up", "head"]  # a container with a residual connection, and leaves


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_an_edit_does_what_plain_hooks_do(name: str, tensor: str, device: str) -> None:
    model, twin = residual(device), residual(device)
    plain = Plain(EDITS[name])
    for module in (twin.blocks[1], *(block.up for block in twin.blocks), twin.head):
        plain.hang(module, tensor)
    made = edit(model, WHERE, EDITS[name], tensor)
    got, want = run(model, device=device), run(twin, device=device)
    assert_close(got, want)
    assert made.changed == plain.changed > 0
    assert differ(got, run(residual(device), device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_edits_do_what_eager_ones_do(backend: str, device: str) -> None:
    cases = [("clip", "grad_output"), ("scale", "grad_input"), ("mask", "output")] if OLD else CASES
    few = backend == "inductor"  # modules, so that few kernels are compiled

    def run_edited(backend: str | None) -> tuple[list[torch.Tensor], list[int]]:
        model, where = (few_modules().to(device), ["1"]) if few else (residual(device), ["blocks.1", "blocks.1.up"])
        captured = hookstats.capture(model, where, items=2, channels=5)
        made = [edit(model, where, EDITS[name], tensor) for name, tensor in cases]
        found = run(model, compile_with(model, backend), device=device)
        shots = [shot for name in where for shot in captured[name]]
        kept = [shot.output for shot in shots] + [shot.gradient for shot in shots if not OLD]  # docs/limits.md
        return [*found, *kept], [one.changed for one in made]

    (got, got_changed), (want, want_changed) = run_edited(backend), run_edited(None)
    assert_close(got, want)
    # Under inductor rounding differs, and with it on which side of a bound a value lies.
    assert got_changed == pytest.approx(want_changed, rel=0.01 if few else 0)
    if few:  # what "clip above" would change, "clip" has changed before
        assert {name for (name, _), changed in zip(cases, want_changed, strict=True) if not changed} <= {"clip above"}


def few_modules() -> nn.Sequential:
    """Make three modules. Every tensor of the middle one is edited, and each edit has something to change there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=not OLD))
    nn.init.normal_(model[1].weight, std=4.0)
    return model


def test_edits_that_come_and_go_after_the_first_compiled_run_are_not_ignored() -> None:
    model = residual()
    forward = compile_with(model, "aot_eager")
    bare = run(model, forward, steps=1)
    model.zero_grad()
    with (
        edit(forward, "blocks.*", clip_to(-1e-3, 1e-3), "grad_output") as clip,
        edit(model, "head", zero_below(0.3)) as mask,
    ):
        assert differ(run(model, forward, steps=1), bare)
        changed = clip.changed, mask.changed
        assert all(changed)
    model.zero_grad()
    assert_close(run(model, forward, steps=1), bare)
    assert (clip.changed, mask.changed) == changed


def test_equal_blocks_that_are_compiled_apart_share_their_graphs() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = Residual(depth=12)
    made = [edit(model, "blocks.*", clip_to(-0.01, 0.01), "grad_output"), edit(model, "blocks.*.up", zero_below(0.3))]
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    run(model)
    assert counter.frame_count <= 4
    assert all(one.changed for one in made)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Residual(depth=2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inner.head(x)


@pytest.mark.parametrize(
    ("reentrant", "how", "backend"),
    [
        (True, "eager", None),
        (False, "eager", None),
        (False, "checkpoints in the graph", "aot_eager"),
        (False, "checkpoints in the graph", "aot_eager_decomp_partition"),  # whose backward recomputes as inductor's
        (True, "checkpoints around graphs", "aot_eager"),
        (False, "checkpoints around graphs", "aot_eager"),
    ],
)
def test_recomputation_changes_neither_results_nor_counts(reentrant: bool, how: str, backend: str | None) -> None:
    def run_edited(reentrant: bool | None, how: str) -> tuple[list[torch.Tensor], list[int]]:
        model = Checkpointed(reentrant)
        made = [
            edit(model, "inner.blocks.?", clip_to(-0.05, 0.05), "grad_output"),
            edit(model, "*.up", zero_below(0.3)),
            edit(model, "*.down", scale_by(0.5), "grad_input"),
            edit(model, "*.norm", torch.tanh, "input"),
        ]
        if how == "checkpoints around graphs":
            for block in model.inner.blocks:
                block.compile(fullgraph=True, backend=backend)
        forward = compile_with(model, backend) if how == "checkpoints in the graph" else model
        return run(model, forward), [one.changed for one in made]

    (got, got_changed), (want, want_changed) = run_edited(reentrant, how), run_edited(None, "eager")
    assert_close(got, want, exact=backend != "aot_eager_decomp_partition")
    assert got_changed == want_changed


def without_in_place(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*(nn.ReLU() if isinstance(module, nn.ReLU) else module for module in model))


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=NOT_OLD)])
def test_in_place_neighbours_are_no_hindrance(backend: str | None) -> None:
    """The edited modules work in place or are followed by one that does; full backward hooks raise there."""

    def results(model: nn.Sequential, hang: Callable[[nn.Module], Any], backend: str | None) -> list[torch.Tensor]:
        hang(model)
        model.eval()
        compile_with(model, backend)(images()).square().sum().backward()
        return [p.grad for p in model.parameters()]

    def plain(model: nn.Sequential) -> None:
        for place in (1, 2, 3):
            Plain(lambda g: g.clamp(-0.01, 0.01)).hang(model[place], "grad_output")
        Plain(lambda g: g * 0.5).hang(model[4], "grad_input")
        Plain(lambda x: x * (x.abs() > 0.1)).hang(model[1], "output")

    def ours(model: nn.Sequential) -> None:
        edit(model, "[123]", clip_to(-0.01, 0.01), "grad_output")
        edit(model, "4", scale_by(0.5), "grad_input")
        edit(model, "1", zero_below(0.1))

    torch.manual_seed(0)
    model = small_cnn()
    with pytest.raises(RuntimeError, match="modified inplace"):
        results(copy.deepcopy(model), plain, None)
    want = results(without_in_place(copy.deepcopy(model)), plain, None)
    assert_close(results(model, ours, backend), want)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("tensor", ["grad_output", "grad_input"])
def test_a_module_that_passes_its_input_on_has_a_gradient_of_its_own(tensor: str, backend: str | None) -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.skip = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return 2 * y + 3 * self.skip(y)

    model = Shortcut()
    edit(model, "skip", scale_by(10), tensor)
    compile_with(model, backend)(torch.ones(1, 4)).sum().backward()
    assert model.inner.bias.grad.tolist() == [32] * 4


def test_edits_of_one_tensor_act_in_the_order_in_which_they_were_made() -> None:
    x = torch.tensor([[1.0, 5.0]], requires_grad=True)
    for tensor in ("output", "input"):
        model = nn.Identity()
        edit(model, "", lambda t: t + 1, tensor)
        edit(model, "", lambda t: t * 2, tensor)
        assert model(x).tolist() == [[4, 12]]
    for tensor in ("grad_output", "grad_input"):
        model = nn.Identity()
        edit(model, "", clip_to(0, 3), tensor)
        edit(model, "", scale_by(10), tensor)
        edit(model, "", clip_to(0, 25), tensor)
        (gradient,) = torch.autograd.grad(model(x), x, torch.tensor([[2.0, 7.0]]))
        assert gradient.tolist() == [[20, 25]]


def test_a_gradient_edit_meets_the_tensor_that_the_edits_before_it_made() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    for clip_first, want in ((True, 1.0), (False, 6.0)):
        model = nn.Identity()
        if clip_first:
            edit(model, "", clip_to(-1, 1), "grad_output")  # of x: at most 1
        edit(model, "", torch.square)
        if not clip_first:
            edit(model, "", clip_to(-1, 1), "grad_output")  # of x ** 2: at most 1, and 2 * 3 of x
        (gradient,) = torch.autograd.grad(model(x), x, torch.tensor([7.0]))
        assert gradient.item() == want


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=NOT_OLD)])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("attach_at", [0, 1, 2])
def test_statistics_see_the_tensor_before_the_edit_or_after_it(
    attach_at: int, after: bool, backend: str | None
) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    others: list[float] = []
    steps: list[Callable[[], Any]] = [
        lambda: edit(model, "0", lambda t: t + 10, after=after),
        lambda: edit(model, "1", clip_to(-1, 1), "grad_output", after=after),
    ]
    monitors = []
    steps.insert(attach_at, lambda: monitors.append(hookstats.attach(model, ["0", "1"], every=1)))
    for step in steps:
        step()
    if backend is None:
        model[0].register_forward_hook(lambda m, args, output: others.append(output.max().item()))
    (compile_with(model, backend)(torch.zeros(3, 4, requires_grad=True)) * 5).sum().backward()
    snapshot = monitors[0].snapshot()
    assert snapshot["0", "output"].total.max == (10 if after else 0)
    assert snapshot["1", "grad_output"].total.max == (1 if after else 5)
    assert model[1].bias.grad.tolist() == [3] * 4
    assert others == ([10] if backend is None else [])  # the hook of another keeps its place: it came last


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "nested", "with_ints"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_every_floating_tensor_in_a_container_is_edited(kind: str, backend: str | None) -> None:
    def leaves(output: Any) -> list[Any]:
        return torch.utils._pytree.tree_leaves(vars(output) if kind == "dataclass" else output)

    torch.manual_seed(0)
    model = Containers(kind)
    x = torch.randn(9, 6)
    bare = model(x)
    mask = edit(model, "", zero_below(0.7))
    scale = edit(model, "", scale_by(100), "grad_output")
    output = compile_with(model, backend)(x)
    assert type(output) is type(bare)
    masked = 0
    for got, want in zip(leaves(output), leaves(bare), strict=True):
        if isinstance(want, torch.Tensor) and want.is_floating_point():
            assert torch.equal(got, want.where(want.abs() > 0.7, 0))
            masked += int((got != want).sum())
            got.sum().backward(retain_graph=True)
        else:
            assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    assert mask.changed == masked
    assert scale.changed > 0
    assert model.inner.weight.grad.abs().max() > 50


def test_one_tensor_in_a_container_can_be_chosen() -> None:
    model = Containers("dict")
    x = torch.randn(9, 6)
    bare = model(x)
    mask = edit(model, "", zero_below(100), "output.hidden")
    got = model(x)
    assert torch.equal(got["logits"], bare["logits"])
    assert not got["hidden"].any()
    assert mask.changed == got["hidden"].numel()
    edit(model, "", zero_below(1), "output.nowhere")
    with pytest.raises(TypeError, match=r"as output.nowhere of \(model\), got output.logits torch.float32, output.hid"):
        model(x)


def test_a_tensor_in_two_places_is_edited_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 1
            return y, y

    model = Twice()
    x = torch.ones(2, requires_grad=True)
    edit(model, "", lambda t: t + 1)
    scale = edit(model, "", scale_by(10), "grad_output")
    a, b = model(x)
    assert a is b
    (a + b).sum().backward()
    assert x.grad.tolist() == [20, 20]
    assert scale.changed == 2


def test_inputs_are_edited_by_place_and_by_name() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return (x + y) * scale

    x, y, scale = torch.tensor(1.0), torch.tensor(10.0), torch.tensor(100.0)
    for tensor, want in (("input.1", 1100), ("input.scale", 2200), ("input", 4400)):
        model = Add()
        edit(model, "", lambda t: 2 * t, tensor)
        if tensor == "input.1":
            assert model(x, y, scale=scale) == 2100
        else:
            assert model(x, y=y, scale=scale) == want


def test_an_input_edit_leaves_the_callers_tensor_alone() -> None:
    model = nn.ReLU(inplace=True)
    x = torch.tensor([-1.0, 0.5, 2.0])
    edit(model, "", lambda t: t - 1, "input")
    assert model(x).tolist() == [0, 0, 1]
    assert x.tolist() == [-1, 0.5, 2]


@pytest.mark.gpu
def test_edits_do_not_wait_for_the_device() -> None:
    model = residual("cuda")
    made = [edit(model, WHERE, EDITS[name], tensor) for name, tensor in CASES]
    run(model, device="cuda")
    x = torch.randn(3, 5, 16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(one.changed for one in made)
