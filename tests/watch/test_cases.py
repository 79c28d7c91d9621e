"""Everything that models and training steps do, a test for each: what hookstats does with it.

What other files hold in depth is here once, small. Distributed: test_distributed.py. CUDA graphs: test_cuda_graphs.py.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hookstats
from tests.conftest import check
from tests.models import Containers
from tests.plain import OF_OUTPUTS, Plain, check_against, hearing


class Calls(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


# Passes through modules.


def test_microbatches_merge_and_calls_says_how_often() -> None:
    model = mlp()
    mon, plain = hookstats.attach(model, tensors=OF_OUTPUTS), Plain(model)
    for seed in range(3):
        run(model, batch(seed))
    check_against(plain, mon.snapshot())
    assert {stats.calls for stats in mon.snapshot().values()} == {3}


def test_a_module_called_twice_and_a_shared_module_merge_under_their_first_name() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    mon = hookstats.attach(model, tensors=OF_OUTPUTS)
    y = [batch()]
    for module in model:
        y.append(module(y[-1]))
    y[-1].sum().backward()
    assert {site.name for site in mon.snapshot()} == {"0", "1"}
    check(mon.snapshot()["0", "output"], torch.cat([y[1], y[3]]).detach(), -1)


def test_an_unused_output_has_fewer_gradients_than_outputs() -> None:
    model = mlp()
    mon = hookstats.attach(model)
    model(batch())
    run(model, batch())
    assert mon.snapshot()["2", "output"].calls == 2
    assert mon.snapshot()["2", "grad_output"].calls == 1


def test_backward_twice_counts_twice() -> None:
    model = mlp()
    mon = hookstats.attach(model)
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert [mon.snapshot()["0", kind].calls for kind in ("output", "grad_output")] == [1, 2]


def test_autocast_is_measured_in_the_dtype_that_arrives() -> None:
    model = mlp()
    mon, plain = hookstats.attach(model), Plain(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(batch())
    y.float().sum().backward()
    assert plain.seen["0", "output"][0].dtype == torch.bfloat16
    check_against(plain, mon.snapshot())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_forward_alone_is_measured_and_training_may_follow(context: Any) -> None:
    model = mlp()
    with context():
        mon = hookstats.attach(model, tensors=OF_OUTPUTS)
        model(batch())
    assert {site.tensor for site in mon.snapshot().order} == {"output"}
    run(model, batch())
    assert [mon.snapshot()["0", kind].calls for kind in ("output", "grad_output")] == [2, 1]


def test_threads_that_run_one_model_are_all_counted() -> None:
    model = mlp()
    mon = hookstats.attach(model, tensors=OF_OUTPUTS)
    threads = [threading.Thread(target=lambda: [run(model, batch()) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {stats.calls for stats in mon.snapshot().values()} == {80}
    assert mon.snapshot()["0", "output"].total.count == 80 * 5 * 8


def test_threads_that_learn_a_width_at_the_same_time_lose_no_site() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    x = torch.randn(1 << 13, 4)  # so large that the kernel lets other threads run
    try:
        for _ in range(30):
            model = nn.Sequential(nn.ReLU(), nn.Tanh())
            mon = hookstats.attach(model, options=hookstats.Options(strict=True))
            threads = [threading.Thread(target=lambda model=model: [model(x) for _ in range(5)]) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert mon.skipped == {}
            assert [mon.snapshot()[name, "output"].calls for name in "01"] == [20, 20]
    finally:
        sys.setswitchinterval(before)


# In place.


def test_an_output_that_is_overwritten_after_the_hook_was_measured_before_and_its_gradient_is_its_own() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y.mul_(3)

    model = Overwrites()
    mon = hookstats.attach(model)
    model(batch()).sum().backward()
    check(mon.snapshot()["inner", "output"], model.inner(batch()).detach(), -1)
    check(mon.snapshot()["inner", "grad_output"], torch.full((5, 4), 3.0), -1)


def test_a_module_that_is_itself_in_place_is_measured_by_its_output_and_its_input_before() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True))
    mon = hookstats.attach(model, tensors=("input", "output", "grad_output"))
    run(model, batch())
    before = model[0](batch()).detach()
    check(mon.snapshot()["1", "input"], before, -1)
    check(mon.snapshot()["1", "output"], before.relu(), -1)


# Outputs and inputs.


@pytest.mark.parametrize(
    ("kind", "first"), [("tuple", ".0"), ("dict", ".logits"), ("dataclass", ".logits"), ("nested", ".0.a")]
)
def test_tensors_in_containers_are_sites_of_their_own(kind: str, first: str) -> None:
    model = Containers(kind)
    mon = hookstats.attach(model, modules=lambda name, _: name == "")
    model(batch())
    check(mon.snapshot()["", "output" + first], model.inner(batch()).detach() * 2, -1)


def test_a_model_output_of_transformers_is_walked() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    model = nn.Sequential(
        nn.Linear(6, 4), Calls(lambda x: BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x,)))
    )
    mon = hookstats.attach(model)
    model(batch())
    y = model[0](batch()).detach()
    check(mon.snapshot()["1", "output.last_hidden_state"], 2 * y, -1)
    check(mon.snapshot()["1", "output.hidden_states.0"], y, -1)


def test_inputs_given_by_name_have_that_name() -> None:
    model = Calls(lambda x, mask: x * mask)
    mon = hookstats.attach(model, modules=lambda name, _: name == "", tensors="input")
    mask = torch.rand(5, 6)
    model(batch(), mask=mask)
    check(mon.snapshot()["", "input.mask"], mask, -1)
    check(mon.snapshot()["", "input.0"], batch(), -1)


def test_an_output_is_passed_on_as_it_is() -> None:
    kept = batch()
    model = Calls(lambda _: kept)
    hookstats.attach(model)
    assert model(batch()) is kept


def test_hooks_of_others_see_what_they_saw_before() -> None:
    model = mlp()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda m, a, y: y * 2)
    model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    mon = hookstats.attach(model)
    run(model, batch())
    unhooked = mlp()[0](batch()).detach()
    check(mon.snapshot()["0", "output"], 2 * unhooked, -1)  # what the module puts out in the end
    assert len(seen) == 1


# Dtypes, layouts, shapes.


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("integer", lambda x: x.argmax(-1)),
        ("bool", lambda x: x > 0),
        ("complex", lambda x: torch.complex(x, x)),
        ("conjugate", lambda x: torch.complex(x, x).conj()),
        ("sparse", lambda x: x.to_sparse()),
        ("csr", lambda x: x.to_sparse_csr()),
        ("nested", lambda x: torch.nested.nested_tensor([x, x[:2]])),
        ("quantised", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        ("mkldnn", lambda x: x.to_mkldnn()),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|Sparse CSR|deprecated|quantize)")
def test_what_has_no_kernel_is_skipped_counted_and_told_once(name: str, make: Any) -> None:
    model = Calls(lambda x: make(x.detach()))
    mon = hookstats.attach(model)
    with pytest.warns(UserWarning, match="not measured"):
        model(batch())
    with hearing() as told:
        model(batch())
    assert told == []
    assert set(mon.skipped) == {("", "output"), ("", "grad_output")}


def test_a_negated_view_is_measured_as_what_it_shows() -> None:
    x = torch.complex(batch(), batch(1)).conj().imag
    assert x.is_neg()
    mon = hookstats.attach(model := Calls(lambda _: x))
    model(batch())
    check(mon.snapshot()["", "output"], -batch(1), -1)


def test_a_0_dim_tensor_is_one_channel() -> None:
    mon = hookstats.attach(model := Calls(lambda x: x.sum()))
    y = model(batch())
    check(mon.snapshot()["", "output"], y.reshape(1, 1), -1)


def test_an_empty_tensor_is_nothing() -> None:
    mon = hookstats.attach(model := Calls(lambda x: x[:0]))
    model(batch())
    assert mon.snapshot()["", "output"].calls == 0
    assert mon.skipped == {}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:, :1].expand(5, 7),
        lambda x: x.t(),
        lambda x: x[::2, 1::2],
        lambda x: x.as_strided((3, 4), (2, 3), 1),
    ],
)
def test_any_strides_are_read(make: Any) -> None:
    mon = hookstats.attach(model := Calls(make))
    y = model(batch())
    check(mon.snapshot()["", "output"], y, -1)


# Tensors without data of their own.


def test_meta_and_fake_tensors_and_those_inside_functorch_pass_through() -> None:
    model = mlp()
    mon = hookstats.attach(model)
    weights = dict(model.named_parameters())
    torch.func.vmap(model)(batch())
    torch.func.grad(lambda w: torch.func.functional_call(model, w, batch()).sum())(weights)
    meta = {name: torch.empty_like(w, device="meta") for name, w in weights.items()}
    torch.func.functional_call(model, meta, torch.empty(5, 6, device="meta"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(batch()))
    assert mon.snapshot().order == []
    assert mon.skipped == {}


class Wrapper(torch.Tensor):
    """Holds its data in another tensor."""

    inner: torch.Tensor
    refuses = False

    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.refuses:
            raise NotImplementedError(f"no {func} here")
        unwrapped = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        result = func(*unwrapped, **(kwargs or {}))
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


class Refusing(Wrapper):
    refuses = True


def test_a_wrapper_subclass_is_measured_through_the_dispatcher_gradient_too() -> None:
    model = nn.Sequential(Calls(lambda x: x * 2), Calls(lambda x: x.inner * 3 if isinstance(x, Wrapper) else x * 3))
    mon = hookstats.attach(model)
    x = Wrapper(batch()).requires_grad_()
    y = model[0](x)
    y.backward(Wrapper(torch.full((5, 6), 7.0)))
    check(mon.snapshot()["0", "output"], 2 * batch(), -1)
    check(mon.snapshot()["0", "grad_output"], torch.full((5, 6), 7.0), -1)
    assert mon.skipped == {}


def test_a_wrapper_that_refuses_is_skipped_with_its_reason_and_the_step_goes_on() -> None:
    mon = hookstats.attach(model := Calls(lambda x: Refusing(x)))
    with pytest.warns(UserWarning, match=r"not measured.*NotImplementedError: no hookstats.observe"):
        model(batch())
    assert set(mon.skipped) == {("", "output")}  # it has no gradient


def test_a_tapped_wrapper_is_measured() -> None:
    mon = hookstats.attach(mlp())
    mon.tap(Wrapper(batch()), "wrapped")
    check(mon.snapshot()["wrapped", "output"], batch(), -1)


# Copies.


def test_copies_and_state_dicts_are_unaffected_and_copies_not_measured() -> None:
    model = mlp()
    names = list(model.state_dict())
    mon = hookstats.attach(model)
    assert list(model.state_dict()) == names
    assert list(model.buffers()) == []
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        run(twin, batch())
    assert mon.snapshot().order == []


def test_data_parallel_is_refused() -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        hookstats.attach(nn.DataParallel(mlp()))


# Modules whose hooks never run.


def test_attentions_output_projection_is_never_called_and_is_named_as_silent() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    mon = hookstats.attach(model, "out_proj", every=1)
    x = torch.randn(3, 4, 8)
    for _ in range(2):
        model(x, x, x)[0].sum().backward()
        mon.step()
    model(x, x, x)[0].sum().backward()
    with pytest.warns(UserWarning, match="in 3 measured steps nothing came from out_proj output"):
        mon.step()
    assert "did not fire: out_proj output, out_proj grad_output" in mon.snapshot().table()


def test_an_expert_that_gets_no_tokens_is_told_as_silent_with_that_reason() -> None:
    expert = nn.Linear(4, 4)
    mon = hookstats.attach(expert, "*", tensors="output", every=1)
    for _ in range(2):
        expert(torch.empty(0, 4))
        mon.step()
    expert(torch.empty(0, 4))
    with pytest.warns(UserWarning, match=r"nothing came from \(model\) output: .* an expert without tokens"):
        mon.step()
