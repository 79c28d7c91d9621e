"""Tests of attach: the watched sites, their numbers, and that training does not notice."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import hookstats
from hookstats import ExponentBins, Site
from hookstats.watch.arguments import OF_LANGUAGE, TENSORS
from tests.conftest import DEVICES, check
from tests.models import THREE_KINDS, Containers, Residual, images, small_cnn
from tests.plain import OF_OUTPUTS, Plain, check_against
from tests.tools.edits import zero_below


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_channel", [False, True])
def test_every_default_site_of_a_cnn_matches_plain_hooks(per_channel: bool, device: str) -> None:
    model = small_cnn().to(device)
    mon = hookstats.attach(model, every=1, histogram=ExponentBins(per_channel), tensors=OF_OUTPUTS)
    plain = Plain(model)
    model(images().to(device)).square().mean().backward()
    mon.step()
    snapshot = mon.snapshot()
    names = ["0", "1", "2", "3", "4", "7"]  # neither Dropout nor Flatten
    assert [site.name for site in snapshot.order] == names + names[::-1]
    assert set(snapshot) == {Site(name, tensor) for name in names for tensor in ("output", "grad_output")}
    check_against(plain, snapshot)
    assert mon.skipped == {}


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("tuple", [".0", ".1"]),
        ("dict", [".logits", ".hidden"]),
        ("dataclass", [".logits", ".hidden.0", ".hidden.1"]),
        ("nested", [".0.a", ".1.0"]),
        ("with_ints", [".0"]),
    ],
)
def test_every_floating_tensor_in_a_container_is_a_site(kind: str, paths: list[str]) -> None:
    model = Containers(kind)
    mon = hookstats.attach(model, modules=lambda name, module: name == "", tensors=THREE_KINDS, every=1)
    x = torch.randn(9, 6)
    for _ in range(2):
        output = model(x)
        flat = torch.utils._pytree.tree_leaves(vars(output) if kind == "dataclass" else output)
        sum(t.sum() for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()).backward()
    snapshot = mon.step()
    assert set(snapshot) == {Site("", tensor + path) for tensor in ("output", "grad_output") for path in paths}
    assert [site for site in snapshot.order if site.tensor.startswith("output")] == [
        Site("", "output" + path) for path in paths
    ]
    y = model.inner(x).detach()
    check(snapshot["", "output" + paths[0]], torch.cat([2 * y, 2 * y]), -1)
    assert all(snapshot[site].calls == 2 for site in snapshot)
    assert mon.skipped == {}
    assert len(mon.sites) == len(snapshot)


EVERYTHING = {"modules": "*", "tensors": [kind for kind in TENSORS if kind not in OF_LANGUAGE]}


def trained(way: str, attached: dict[str, Any] | None, steps: int = 30) -> list[torch.Tensor]:
    """Losses and final weights of a training run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = small_cnn()
    forward: Any = model
    if way == "compiled":
        forward = torch.compile(model, backend="aot_eager")
    elif "reentrant" in way:
        body, head = model[:5], model[5:]
        forward = lambda x: head(checkpoint(body, x.requires_grad_(), use_reentrant=way == "reentrant"))  # noqa: E731
    options = hookstats.Options(strict=True)
    mon = None if attached is None else hookstats.attach(model, every=2, options=options, **attached)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        ignoring = nullcontext() if mon is None or way != "masked" else mon.ignore(torch.arange(16) % 3 == step % 3)
        with ignoring, torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = forward(images(seed=step)).float().square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach().clone())
        if mon is not None:
            mon.step(loss=loss)
    return [*losses, *(each.detach().clone() for each in model.state_dict().values())]


@pytest.mark.parametrize(
    ("way", "attached"),
    [
        ("eager", {"histogram": ExponentBins(True)}),
        ("autocast", {"histogram": ExponentBins(True)}),
        ("reentrant", {"histogram": ExponentBins(True)}),
        ("non-reentrant", {"histogram": ExponentBins(True)}),
        ("eager", EVERYTHING),
        ("compiled", EVERYTHING),
        ("masked", EVERYTHING),
        ("eager", {"rows": 8}),
    ],
)
def test_training_is_bit_identical_with_and_without(way: str, attached: dict[str, Any]) -> None:
    with_it, without = trained(way, attached), trained(way, None)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    assert not torch.equal(without[0], without[29])


def test_no_grad_and_inference_mode_measure_the_forward_only() -> None:
    for context in (torch.no_grad, torch.inference_mode):
        model = small_cnn()
        with context():
            mon = hookstats.attach(model, tensors=OF_OUTPUTS)
            model(images())
        snapshot = mon.snapshot()
        assert {site.tensor for site in snapshot.order} == {"output"}
        model(images()).sum().backward()
        assert {site.tensor for site in mon.snapshot().order} == {"output", "grad_output"}
        mon.step()
        with mon.paused():
            model(images())
        assert mon.snapshot().step == 0


def state_of(model: nn.Module) -> tuple[Any, ...]:
    hooks = [
        {k: v for k, v in vars(m).items() if "hook" in k and v is not None and not (isinstance(v, dict) and v)}
        for m in model.modules()
    ]
    counts = [sum(len(v) for k, v in vars(m).items() if "hook" in k and isinstance(v, dict)) for m in model.modules()]
    return [sorted(vars(m)) for m in model.modules()], [sorted(h) for h in hooks], counts, sorted(model.state_dict())


def test_detach_leaves_the_model_as_it_was() -> None:
    model = small_cnn()
    before = state_of(model)
    mon = hookstats.attach(model)
    assert sorted(model.state_dict()) == before[-1]
    model(images()).sum().backward()
    assert state_of(model) != before
    mon.detach()
    mon.detach()
    assert state_of(model) == before
    assert mon.snapshot().order  # what was measured can still be read

    with pytest.raises(RuntimeError, match="mat1 and mat2"), hookstats.attach(model):
        model(torch.randn(2, 1, 9, 9))
    assert state_of(model) == before


def test_a_gradient_that_arrives_after_detach_is_dropped() -> None:
    model = nn.Linear(4, 4)
    mon = hookstats.attach(model)
    loss = model(torch.randn(3, 4)).sum()
    mon.detach()
    loss.backward()
    assert mon.snapshot()["", "grad_output"].calls == 0
    assert mon.snapshot()["", "output"].calls == 1


def test_deepcopy_and_pickle_give_unwatched_models() -> None:
    model = small_cnn()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS)
    other = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (other, loaded):
        twin(images()).sum().backward()
        assert mon.snapshot().order == []
    model(images()).sum().backward()
    assert len(mon.snapshot().order) == 12
    again = hookstats.attach(pickle.loads(pickle.dumps(other)), tensors=OF_OUTPUTS)
    assert len(again.sites) == 12


def test_a_pickled_model_loads_where_hookstats_is_not_installed() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    hookstats.attach(model)
    script = (
        "import sys, pickle\n"
        "sys.modules['hookstats'] = None\n"
        "model = pickle.loads(sys.stdin.buffer.read())\n"
        "import torch\n"
        "print(model(torch.zeros(1, 3)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(model), capture_output=True)
    assert b"torch.Size([1, 2])" in done.stdout, done.stderr.decode()


def test_two_monitors_on_one_model_are_independent() -> None:
    model = small_cnn()
    every, rarely = hookstats.attach(model, every=1), hookstats.attach(model, "7", every=2, tensors="output")
    for step in range(4):
        model(images(seed=step)).sum().backward()
        one, two = every.step(), rarely.step()
        assert (two is not None) == (step % 2 == 0)
        if two is not None:
            assert list(two) == [("7", "output")]
            assert two["7", "output"].total.mean == one["7", "output"].total.mean
    rarely.detach()
    model(images()).sum()
    assert every.step() is not None


def test_a_monitor_that_is_dropped_lets_its_memory_go() -> None:
    model = nn.Linear(4, 4)
    mon = hookstats.attach(model)
    model(torch.randn(2, 4)).sum().backward()
    store, net = weakref.ref(mon._store), weakref.ref(model)
    gc.disable()
    try:
        mon.detach()
        del mon
        assert store() is None
        del model
        assert net() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("module", "shape", "dim"),
    [
        (nn.Linear(5, 7), (3, 4, 5), -1),
        (nn.Embedding(9, 6), None, -1),
        (nn.LayerNorm((3, 5)), (4, 3, 5), -1),
        (nn.RMSNorm(5), (2, 4, 5), -1),
        (nn.Conv1d(3, 7, 2), (2, 3, 9), 1),
        (nn.Conv2d(3, 7, 2), (2, 3, 9, 9), 1),
        (nn.Conv2d(3, 7, 2), (3, 9, 9), 0),
        (nn.ConvTranspose2d(3, 7, 2), (2, 3, 9, 9), 1),
        (nn.Conv3d(3, 7, 2), (2, 3, 4, 5, 6), 1),
        (nn.BatchNorm1d(5), (8, 5), 1),
        (nn.BatchNorm1d(5), (8, 5, 3), 1),
        (nn.BatchNorm2d(5), (8, 5, 3, 3), 1),
        (nn.GroupNorm(2, 6), (3, 6, 5), 1),
        (nn.InstanceNorm2d(4), (3, 4, 5, 5), 1),
        (nn.MaxPool2d(2), (3, 4, 6, 6), 1),
        (nn.MaxPool2d(2), (4, 6, 6), 0),
        (nn.AdaptiveAvgPool1d(3), (2, 4, 9), 1),
        (nn.ReLU(), (3, 4, 6, 6), 1),
        (nn.ReLU(), (3, 4, 6), -1),
        (nn.LazyLinear(7), (3, 5), -1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_the_channel_dimension_of_each_kind_of_module(module: nn.Module, shape: Any, dim: int) -> None:
    x = torch.randint(9, (4, 5)) if shape is None else torch.randn(shape)
    mon = hookstats.attach(module)
    y = module(x)
    check(mon.snapshot()["", "output"], y, dim)


def test_channel_dim_and_channels_can_be_chosen() -> None:
    model = small_cnn()
    mon = hookstats.attach(model, channels=hookstats.Channels(["[0-4]", "7"], dim={"*": -1, "7": 0}))
    y = images()
    for i, module in enumerate(model):
        y = module(y)
        if i == 3:
            conv = y.clone()
    snapshot = mon.snapshot()
    check(snapshot["3", "output"], conv, -1)
    check(snapshot["7", "output"], y, 0)
    totals = hookstats.attach(small_cnn(), channels=False)
    assert all(stats.channels is None for stats in totals.snapshot().values())


def test_measure_one_tensor() -> None:
    x = torch.randn(50, 7, requires_grad=True)
    check(hookstats.measure(x), x, -1)
    check(hookstats.measure(x, 0, histogram=ExponentBins(True)), x, 0)
    image = torch.randn(2, 3, 5, 7)
    check(hookstats.measure(image), image, 1)  # as attach and tap take what tells nothing else
    assert hookstats.measure(x, channels=False).channels is None
    assert hookstats.measure(torch.tensor(3.0)).total.mean == 3
    assert hookstats.measure(x, histogram=None).histogram is None
    assert np.isnan(hookstats.measure(torch.empty(0)).total.mean)
    with pytest.raises(TypeError, match=r"expected a torch.Tensor, got list"):
        hookstats.measure([1.0])  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="expected channel_dim from -2 to 1, got 2"):
        hookstats.measure(x, 2)
    with pytest.raises(TypeError, match=r"got torch.int64"):
        hookstats.measure(torch.arange(3))


def test_modules_that_are_leaves_to_their_users() -> None:
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.MultiheadAttention(6, 2))
    mon = hookstats.attach(normed, tensors=OF_OUTPUTS)
    assert {site.name for site in mon.sites} == {"0", "1"}
    y = normed[0](torch.randn(5, 4))
    z, _ = normed[1](y, y, y)
    check(mon.snapshot()["0", "output"], y, -1)
    check(mon.snapshot()["1", "output.0"], z, -1)
    with pytest.raises(ValueError, match="selected none"):
        hookstats.attach(nn.ModuleDict({"only": nn.ModuleList([nn.ReLU()])}), "only")


@pytest.mark.parametrize("modules", [None, "*"], ids=["default", "all"])
@pytest.mark.parametrize("whole", [False, True], ids=["inside", "the model"])
def test_a_module_of_torchscript_takes_no_hook_and_its_parameters_are_measured(
    whole: bool, modules: str | None
) -> None:
    inner: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of torch.jit.script
        inner = torch.jit.script(inner)
    model = inner if whole else nn.Sequential(nn.Linear(8, 8), inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mon = hookstats.attach(model, modules, tensors=("output", "param_grad", "param", "param_update", "buffer"))
    model(torch.randn(5, 8)).pow(2).sum().backward()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    mon.step()
    snapshot = mon.snapshot()
    hooked = set() if whole else {"0"} if modules is None else {"", "0"}
    assert {site.name for site in snapshot if site.tensor == "output"} == hooked
    for name, parameter in model.named_parameters():
        assert snapshot[name, "param"].total.max == before[name].max()
        assert snapshot[name, "param_grad"].total.max == parameter.grad.max()
        assert snapshot[name, "param_update"].total.max == (parameter - before[name]).max()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            assert snapshot[name, "buffer"].total.max == buffer.max()


def test_empty_and_nested_containers_are_not_waited_for() -> None:
    nested = nn.ModuleList([nn.ModuleList([nn.ReLU()])])
    mon = hookstats.attach(nn.ModuleList([nn.ModuleDict(), nn.ParameterDict(), nested]), tensors="output")
    assert {site.name for site in mon.sites} == {"2.0.0"}


def test_wrappers_leave_no_trace_in_names() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(inner, backend="eager")
    assert {site.name for site in hookstats.attach(compiled, tensors=OF_OUTPUTS).sites} == {"0", "1"}  # type: ignore[arg-type]
    module_named = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert {site.name for site in hookstats.attach(module_named, tensors=OF_OUTPUTS).sites} == {"module"}


def test_the_children_of_lists_are_watched_wrapped_or_numbered_by_a_dict_or_not() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2))

    compiled = torch.compile(block(), backend="eager")
    listed = nn.ModuleList([block(), checkpoint_wrapper(block()), compiled])  # type: ignore[list-item]
    numbered, named = nn.ModuleDict({"0": block(), "1": checkpoint_wrapper(block())}), nn.ModuleDict({"a": block()})
    model = nn.ModuleDict({"listed": listed, "numbered": numbered, "named": named})
    watched = {site.name for site in hookstats.attach(model, tensors="output").sites}
    blocks = {"listed.0", "listed.1", "listed.2", "numbered.0", "numbered.1"}
    assert watched == blocks | {f"{each}.0" for each in blocks} | {"named.a.0"}


def test_what_is_excluded_is_left_out_with_all_inside_it() -> None:
    model = Residual()
    kinds = ("output", "param")
    mon = hookstats.attach(model, tensors=kinds, exclude=["blocks.1", "*.norm", "head.bias"])
    names = {site.name for site in mon.sites}
    blocks = {f"blocks.{i}{part}" for i in (0, 2) for part in ("", ".up", ".down")}
    weights = {f"{name}.{key}" for name in blocks if name.count(".") == 2 for key in ("weight", "bias")}
    assert names == blocks | weights | {"head", "head.weight"}
    chosen = hookstats.attach(model, "blocks.*", tensors="output", exclude="blocks.[12]")
    assert {site.name for site in chosen.sites} == {"blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.0.down"}
    without_norms = hookstats.attach(
        model, tensors=kinds, exclude=lambda name, module: isinstance(module, nn.LayerNorm)
    )
    assert not [site for site in without_norms.sites if ".norm" in site.name]
    with pytest.raises(TypeError, match=r"exclude: expected globs, or a callable .* got 7"):
        hookstats.attach(model, exclude=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"exclude: the glob 'nothing' matches nothing"):
        hookstats.attach(model, exclude="nothing")
    with pytest.raises(ValueError, match="selected none"):
        hookstats.attach(model, "blocks.0", exclude="blocks.0")
    with pytest.raises(ValueError, match=r"selected none; modules='\*' selects"):
        hookstats.attach(nn.Sequential(nn.Identity()))
    assert hookstats.attach(nn.Sequential(nn.Identity()), "*").sites


def test_edits_and_captures_choose_modules_as_attach_does() -> None:
    model = Residual()
    x = torch.randn(2, 5, 16)
    with hookstats.capture(model, lambda name, module: isinstance(module, nn.LayerNorm), exclude="blocks.1") as taken:
        model(x)
    assert list(taken) == ["blocks.0.norm", "blocks.2.norm"]
    with hookstats.edit(model, "blocks.*.up", zero_below(1e9), exclude=["blocks.0", "blocks.2"]) as edit:
        model(x)
    assert edit.changed == 2 * 5 * 32
    with pytest.raises(ValueError, match="modules: expected to choose at least one of 15 modules, chose none"):
        hookstats.capture(model, "blocks.0", exclude="blocks.0")


@pytest.mark.glue
def test_a_hook_enters_python_for_what_the_extension_cannot_measure_alone() -> None:
    model = nn.ReLU()
    mon = hookstats.attach(model, tensors=("output", "grad_output"), every=1)
    x = torch.randn(2, 3)
    model(x)  # its width is learned
    entered: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("hookstats."):
            entered.append(frame.f_code.co_name)

    for value, expected in ((x, []), (torch.randn(2, 5), ["rebind"])):
        sys.setprofile(note)
        try:
            model(value)
        finally:
            sys.setprofile(None)
        assert entered[:1] == expected
    assert mon.snapshot()[mon.sites[0]].calls == 3


@pytest.mark.glue
def test_a_hook_is_called_with_a_module_its_inputs_and_its_output() -> None:
    model = nn.ReLU()
    mon = hookstats.attach(model, tensors="output", every=1)
    hook = next(iter(model._forward_hooks.values()))
    x = torch.randn(2, 3)
    with pytest.raises(TypeError, match=r"expected \(module, args, output\), got 2 arguments"):
        hook(model, x)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"expected \(module, args, output\), got 3 arguments and 1 by name"):
        hook(model, (), x, y=x)  # type: ignore[call-arg]
    hook(model, (), x)
    hook(*[model, (), x])
    assert mon.snapshot()[mon.sites[0]].calls == 2
