"""capture(): its tensors against those of plain hooks; and that it does not grow."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hookstats
from hookstats import edit
from tests.conftest import DEVICES, ROOT
from tests.models import Containers, Residual, images, small_cnn
from tests.tools.edits import zero_below
from tests.watch.test_attach import Plain, state_of

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning"),
]


def steps(model: nn.Module, forward: Any, count: int, device: str) -> None:
    for step in range(count):
        forward(images(4, seed=step).to(device)).square().sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_captures_are_the_first_items_and_channels_that_plain_hooks_see(backend: str | None, device: str) -> None:
    torch.manual_seed(0)
    model, names = small_cnn().eval().to(device), ["0", "1", "7"]
    if backend and torch.__version__ < (2, 13):
        names.remove("1")  # graphs refuse an in-place ReLU behind what has a gradient hook
    captured = hookstats.capture(model, names, every=2, items=3, channels=5, keep=2)
    forward: Any = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    steps(model, forward, 7, device)  # calls 0, 2, 4, 6; the last two are kept
    captured.remove()
    plain = Plain(model)
    steps(model, model, 7, device)
    for name in names:
        assert [shot.call for shot in captured[name]] == [4, 6]
        for shot in captured[name]:
            for kept, tensor in ((shot.output, "output"), (shot.gradient, "grad_output")):
                assert kept is not None
                assert kept.device.type == "cpu"
                assert torch.equal(kept, plain.seen[name, tensor][shot.call][:3, :5].cpu())


def test_edits_made_with_after_come_before_what_is_captured() -> None:
    old = torch.__version__ < (2, 13)  # an edit before a ReLU in place fails to compile there
    for backend in (None,) if old else (None, "aot_eager"):
        model = small_cnn().eval()
        captured = [hookstats.capture(model, "1")]
        bare = model[1](model[0](images()))
        edit(model, "1", zero_below(0.5), after=True)
        captured.append(hookstats.capture(model, "1"))
        forward: Any = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        forward(images())
        for each in captured:
            assert torch.equal(each["1"][-1].output, bare.where(bare.abs() > 0.5, 0)[:1])
            assert not torch.equal(each["1"][-1].output, bare[:1])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_recomputed_forward_is_no_call_and_its_gradient_is_kept(reentrant: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    model = Residual()
    captured = hookstats.capture(model, "blocks.*.up", every=2, items=4, channels=99)
    x = torch.randn(4, 5, 16, requires_grad=True)

    def train(recompute: bool) -> list[hookstats.results.Capture]:
        for step in range(3):
            y = x * (step + 1)
            for block in model.blocks:
                y = checkpoint(block, y, use_reentrant=reentrant) if recompute else block(y)
            model.head(y).sum().backward()
        return captured["blocks.1.up"]

    want = train(False)
    captured.remove()
    captured = hookstats.capture(model, "blocks.*.up", every=2, items=4, channels=99)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    got = train(True)
    assert [shot.call for shot in got] == [shot.call for shot in want] == [0, 2]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.output, b.output)
        assert a.gradient is not None
        assert b.gradient is not None
        assert torch.equal(a.gradient, b.gradient)


def test_a_gradient_goes_to_its_own_call() -> None:
    model = nn.Tanh()
    captured = hookstats.capture(model, "", keep=2)
    losses = [model(torch.full((1, 2), float(k), requires_grad=True)).sum() * k for k in range(3)]
    for loss in reversed(losses):  # the first call's place has been taken by the third
        loss.backward()
    first, second = captured[""]
    assert (first.call, second.call) == (1, 2)
    assert first.gradient is not None
    assert second.gradient is not None
    assert first.gradient.tolist() == [[1, 1]]
    assert second.gradient.tolist() == [[2, 2]]


def test_what_has_no_gradient_is_captured_without() -> None:
    model = Containers("with_ints")
    captured = hookstats.capture(model, "", keep=1)
    with torch.inference_mode():
        y = model(torch.randn(3, 6))[0]
    (shot,) = captured[""]
    assert torch.equal(shot.output, y[:1])
    assert shot.gradient is None
    z = model(torch.randn(3, 6))[0]  # after inference mode, the same buffer is as good as new
    z.sum().backward()
    (later,) = captured[""]
    assert torch.equal(later.output, z[:1])
    assert later.gradient is not None
    assert torch.equal(shot.output, y[:1])  # what was read is the reader's


def test_one_item_or_none_and_any_place_of_the_channels() -> None:
    for module, shape, want in (
        (nn.Conv2d(1, 9, 3), (1, 8, 8), (4, 6, 6)),  # no batch: nothing but channels to choose
        (nn.LayerNorm(9), (2, 5, 6, 9), (1, 5, 6, 4)),
        (nn.LayerNorm(9), (9,), (4,)),
        (nn.Flatten(0), (2, 3), (4,)),
    ):
        captured = hookstats.capture(module, "", channels=4)
        module(torch.randn(shape))
        assert captured[""][0].output.shape == want
        captured.plot("")


def test_what_cannot_be_captured_does_not_stop_training() -> None:
    model = nn.Linear(4, 4)
    captured = hookstats.capture(model, "")
    with torch.device("meta"):
        other = nn.Linear(4, 4)
    watched = hookstats.capture(other, "")
    with pytest.warns(UserWarning, match=r"not captured: \(model\): "):
        other(torch.empty(2, 4, device="meta"))
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        other(torch.empty(2, 4, device="meta"))
        model(torch.ones(2, 4))
    assert again == []
    assert watched[""] == []
    assert len(captured[""]) == 1


# In a process of its own: in this one, other tests' threads take memory and give it back.
STEPS = """
import gc, resource, sys
from pathlib import Path
import torch
from torch import nn
import hookstats

def live():  # tensors that Python knows, and the bytes that the process holds in memory
    gc.collect()
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)), held

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
captured = hookstats.capture(model, "*", keep=3)
mask = hookstats.edit(model, "0", lambda t: t * 0)
x = torch.randn(2, 4)
for step in range(1, 2_001):
    model(x).sum().backward()
    if step in (100, 2_000):
        print(*[live() for _ in range(5)][-1])  # to look takes memory, too, the first few times
print(*(shot.call for shot in captured["0"]), mask.changed > 0)
"""


def test_2_000_steps_take_no_more_memory_than_the_first() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, capture_output=True, text=True)
    early, late, calls = done.stdout.splitlines()
    (tensors, held), (tensors_later, held_later) = ([int(n) for n in line.split()] for line in (early, late))
    assert tensors_later == tensors
    assert held_later < held + (1 << 17)  # 69 bytes per step
    assert calls == "1997 1998 1999 True"


def test_remove_leaves_the_model_as_it_was() -> None:
    model = small_cnn().eval()
    before = state_of(model)
    with hookstats.capture(model, "*") as captured:
        bare = model(images())
        assert state_of(model) != before
    captured.remove()
    assert state_of(model) == before
    assert torch.equal(model(images()), bare)
    assert len(captured["7"]) == 1
    assert list(captured) == ["", *map(str, range(8))]


def test_wrong_arguments_say_what_was_expected() -> None:
    model = small_cnn()
    scripted = nn.Sequential(nn.ReLU(), torch.jit.script(nn.ReLU()))  # takes no hooks
    with pytest.raises(RuntimeError, match="not supported on ScriptModules"):
        hookstats.capture(scripted, "*")
    assert hookstats.explain(scripted).rows == []
    captured = hookstats.capture(model, "0")
    with pytest.raises(KeyError, match=r"expected one of '0'; got '1'"):
        captured["1"]
    with pytest.raises(IndexError):
        captured.plot("0")


def test_what_was_captured_is_a_mapping_of_names_to_captures() -> None:
    model = small_cnn()
    with hookstats.capture(model, ["0", "2"]) as captured:
        model(images())
    assert list(captured) == list(captured.keys()) == ["0", "2"]
    assert len(captured) == 2
    assert "0" in captured
    assert "1" not in captured
    assert 0 not in captured
    assert captured.get("1") is None
    assert {name: len(shots) for name, shots in captured.items()} == {"0": 1, "2": 1}
    assert [shots[0].call for shots in captured.values()] == [0, 0]
    assert isinstance(captured, Mapping)
    assert captured == captured
    assert captured != {"0": []}
    assert {captured: "kept"}[captured] == "kept"
    assert repr(captured) == "Captured(0, 2)"
    empty = hookstats.capture(model, "3")
    assert empty["3"] == []
    assert empty  # a module that has not run yet is watched


def test_a_picture_has_an_image_for_every_channel_of_every_tensor() -> None:
    model = small_cnn().eval()
    captured = hookstats.capture(model, ["1", "7"], channels=6, items=2)
    edit(model, "1", zero_below(0.5))
    model(images()).sum().backward()
    figure = captured.plot("1", item=1)
    parts = figure.subfigs
    assert figure.get_suptitle() == "1, call 0"
    assert [part.get_suptitle() for part in parts] == ["output", "gradient"]
    (shot,) = captured["1"]
    for part, tensor in zip(parts, (shot.output, shot.gradient), strict=True):
        shown = [axes.images[0] for axes in part.axes if axes.images]
        assert tensor is not None
        assert len(shown) == 6
        for channel, image in enumerate(shown):
            assert (image.get_array() == tensor[1, channel].numpy()).all()
    limits = [{image.get_clim() for axes in part.axes for image in axes.images} for part in parts]
    assert limits[0] == {(shot.output[1].min().item(), shot.output[1].max().item())}
    ((low, high),) = limits[1]
    assert -low == high == shot.gradient[1].abs().max()
    assert len(captured.plot("7").subfigs) == 2


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_cnn()
    captured = hookstats.capture(model, "0")
    model(images())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "hookstats._figure", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'hookstats\[report\]'"):
        captured.plot("0")


@pytest.mark.gpu
def test_captures_do_not_wait_for_the_device() -> None:
    model = small_cnn().cuda()
    x = images().cuda()
    captured = hookstats.capture(model, "*")
    model(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(ring._host.is_pinned() for ring in (captured._rings["7"]._slots[0].output,) if ring._host is not None)
    assert len(captured["7"]) == 2


def test_recomputed_calls_that_wait_for_their_gradients_together_get_none_rather_than_each_others() -> None:
    layer = nn.Linear(2, 2)
    captured = hookstats.capture(layer, "")
    x = torch.randn(1, 2, requires_grad=True)
    a, b = (checkpoint(layer, x, use_reentrant=True) for _ in range(2))
    a.sum().backward()
    (100 * b).sum().backward()
    assert [shot.gradient for shot in captured[""]] == [None, None]
    captured = hookstats.capture(layer, "")
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert captured[""][0].gradient is not None


def test_captures_are_read_while_another_thread_trains() -> None:
    layer, x = nn.Linear(2, 2), torch.randn(1, 2)
    captured = hookstats.capture(layer, "", keep=2)
    for _ in range(2):
        layer(x)

    class BetweenTwo(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            thread = threading.Thread(target=layer, args=(x,))
            thread.start()
            thread.join()
            return function(*args, **kwargs or {})

    with BetweenTwo():
        assert len(captured[""]) == 2
    assert [shot.call for shot in captured[""]] == [2, 3]


def test_a_forward_on_fake_tensors_is_no_call() -> None:
    layer = nn.Linear(2, 3)
    captured = hookstats.capture(layer, "", keep=1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        functional_call(layer, {}, (mode.from_tensor(torch.randn(4, 2)),))
    assert captured[""] == []
    y = layer(torch.randn(4, 2))
    (shot,) = captured[""]
    assert shot.call == 0
    assert torch.equal(shot.output, y.detach()[:1])
