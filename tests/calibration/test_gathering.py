"""hookstats.calibrate: what layers are given over all batches, against float64; and a model that is left as it was."""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import calibrate
from hookstats.results import InputStats
from tests.calibration.small import calibrate_small, inputs_of, llama, rows_of, sentences

ROUNDING = 1e-6  # of float32, in which tiles of a tensor are summed


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def batches_of(*shape: int, count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [3 * torch.randn(*shape, generator=generator) for _ in range(count)]


def check(stats: InputStats, rows: torch.Tensor) -> None:
    """rows: float64 ``[tokens, C]``, all of them finite."""
    x = rows.numpy()
    assert stats.tokens == len(x)
    assert (stats.nonfinite, stats.zeros) == (0, (x == 0).sum())
    np.testing.assert_array_equal(stats.abs_max, abs(x).max(0))
    np.testing.assert_allclose(stats.mean, x.mean(0), rtol=ROUNDING, atol=ROUNDING * abs(x).mean())
    np.testing.assert_allclose(stats.abs_mean, abs(x).mean(0), rtol=ROUNDING)
    np.testing.assert_allclose(stats.l2_norm, np.sqrt((x**2).sum(0)), rtol=ROUNDING)
    assert stats.amax == abs(x).max()
    assert all(array.dtype == np.float64 for array in (stats.abs_max, stats.mean, stats.abs_mean, stats.l2_norm))


def test_a_small_llama_over_twenty_batches_is_what_float64_says() -> None:
    model, kept, calibration = calibrate_small()
    assert list(calibration) == [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(calibration) == 15
    for name, stats in calibration.items():
        check(stats, rows_of(kept[name]))


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.99, 0.999, 0.9999, 1.0])
def test_a_quantile_lies_in_the_octave_of_the_exact_one(q: float) -> None:
    _, kept, calibration = calibrate_small()
    for name, stats in calibration.items():
        exact = np.quantile(rows_of(kept[name]).abs().numpy(), q, method="inverted_cdf")
        octave = 2.0 ** np.floor(np.log2(exact)) if exact else 0.0
        assert octave <= stats.quantile(q) <= min(2 * octave, stats.amax), name
        if q >= 0.99 and name.endswith("q_proj"):  # behind a norm: nearly normal
            assert stats.quantile(q) == pytest.approx(exact, rel=0.1)


def test_zeros_lie_at_0_whatever_lies_around_it() -> None:
    x = torch.zeros(10, 6)
    x[:4] = 1e-40  # below all bins but that of zeros
    stats = calibrate(mlp(), [x], "0")["0"]
    assert stats.quantile(0.5) == 0
    assert 0 < stats.quantile(0.7) <= stats.amax == torch.tensor(1e-40).item()


def test_a_quantile_of_nothing_is_0_and_one_beyond_1_is_refused() -> None:
    stats = calibrate(mlp(), [torch.zeros(0, 6)])["0"]
    assert (stats.tokens, stats.quantile(0.5), stats.amax) == (0, 0.0, 0.0)
    with pytest.raises(ValueError, match="expected 0 <= q <= 1, got 99"):
        stats.quantile(99)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_measured_as_they_are(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    batches = [batch.to(dtype) for batch in batches_of(5, 6)]
    kept = inputs_of(model, nn.Linear, batches)
    for name, stats in calibrate(model, batches).items():
        check(stats, rows_of(kept[name]))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(6, 4, 3), (2, 6, 9)),
        (nn.Conv2d(6, 4, 3, padding=1), (2, 6, 7, 5)),
        (nn.Conv2d(6, 4, 3, groups=2), (2, 6, 7, 5)),
        (nn.Conv3d(6, 4, 2), (2, 6, 3, 4, 5)),
        (nn.Conv2d(6, 4, 3), (6, 7, 5)),  # without a batch
    ],
    ids=str,
)
def test_a_token_of_a_convolution_is_a_position(layer: nn.Module, shape: tuple[int, ...]) -> None:
    batches = batches_of(*shape)
    calibration = calibrate(nn.Sequential(layer), batches)
    check(calibration["0"], rows_of(batches, channel_dim=shape.index(6)))


def test_nan_and_infinities_are_left_out_and_counted() -> None:
    batches = batches_of(5, 6)
    batches[1][0, 2], batches[1][3, 2], batches[2][1, 4] = float("nan"), float("inf"), -float("inf")
    batches[3][0, 0] = 0.0
    stats = calibrate(mlp(), batches, "0")["0"]
    x = rows_of(batches).numpy()
    x = np.where(np.isfinite(x), x, np.nan)
    assert (stats.tokens, stats.nonfinite, stats.zeros) == (20, 3, 1)
    np.testing.assert_array_equal(stats.abs_max, np.nanmax(abs(x), 0))
    np.testing.assert_allclose(stats.abs_mean, np.nanmean(abs(x), 0), rtol=ROUNDING)
    np.testing.assert_allclose(stats.mean, np.nanmean(x, 0), rtol=ROUNDING, atol=ROUNDING)
    np.testing.assert_allclose(stats.l2_norm, np.sqrt(np.nansum(x**2, 0)), rtol=ROUNDING)


def test_a_channel_without_any_finite_value_is_0() -> None:
    batches = batches_of(5, 6)
    for batch in batches:
        batch[:, 1] = float("nan")
    stats = calibrate(mlp(), batches, "0")["0"]
    assert [each[1] for each in (stats.abs_max, stats.mean, stats.abs_mean, stats.l2_norm)] == [0, 0, 0, 0]
    assert all(np.isfinite(each).all() for each in (stats.abs_max, stats.mean, stats.abs_mean, stats.l2_norm))
    assert (stats.tokens, stats.nonfinite) == (20, 20)


def test_magnitudes_count_each_value_once_in_its_octave() -> None:
    x = torch.tensor([[0.0, 1.0, -1.5, 2.0, -(2.0**-126), 1e-40]])
    stats = calibrate(mlp(), [x], "0")["0"]
    counts = {int(bin): int(stats.magnitudes[bin]) for bin in stats.magnitudes.nonzero()[0]}
    assert counts == {0: 2, 1: 1, 127: 2, 128: 1}  # 2^-126 begins bin 1, so that 1 begins bin 127
    assert stats.zeros == 1


class Twice(nn.Module):
    """Calls one layer twice, by position and by name, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, by_name: bool) -> torch.Tensor:
        y: torch.Tensor = self.used(input=2 * x) if by_name else self.used(2 * x)
        z: torch.Tensor = self.used(x)
        return y + z


@pytest.mark.parametrize("by_name", [False, True])
def test_a_layer_that_is_called_twice_has_all_its_tokens(by_name: bool) -> None:
    batches = [batch.relu() for batch in batches_of(5, 6)]
    calibration = calibrate(Twice(), [(batch, by_name) for batch in batches])
    check(calibration["used"], rows_of([each for batch in batches for each in (2 * batch, batch)]))


def test_a_layer_that_is_never_called_is_there_and_named() -> None:
    calibration = calibrate(Twice(), [(batch, False) for batch in batches_of(5, 6)])
    unused = calibration["unused"]
    assert (unused.tokens, unused.amax, unused.abs_max.shape) == (0, 0.0, (6,))
    assert calibration.find_uncovered() == {"used": 40, "unused": 0}
    assert calibration.find_uncovered(1) == {"unused": 0}
    assert repr(calibration) == "Calibration(2 layers, 1 without a token)"


def test_a_projection_that_attention_never_calls_is_named() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    calibration = calibrate(model, batches_of(2, 5, 8))
    assert calibration.find_uncovered(1) == {"self_attn.out_proj": 0}
    assert calibration["linear1"].tokens == calibration["linear2"].tokens == 40  # evaluation has a faster way, too


def test_fewer_tokens_means_fewer() -> None:
    calibration = calibrate(mlp(), [torch.randn(64, 6), torch.randn(64, 6)])
    assert calibration.find_uncovered(128) == {}
    assert calibration.find_uncovered(129) == {"0": 128, "2": 128}
    assert calibrate(mlp(), [torch.randn(127, 6)]).find_uncovered() == {"0": 127, "2": 127}


def test_batches_are_given_by_name_by_place_or_as_they_are() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z: torch.Tensor = self.a(x) + self.b(y)
            return z

    x, y = batches_of(5, 6, count=2)
    for batch in ((x, y), [x, y], {"y": y, "x": x}, UserDict(x=x, y=y)):
        calibration = calibrate(Two(), [batch])
        check(calibration["a"], rows_of([x]))
        check(calibration["b"], rows_of([y]))
    called = calibrate(Two(), [x], forward=lambda model, batch: model(batch, 2 * batch))
    check(called["b"], rows_of([2 * x]))


def test_globs_and_callables_choose_layers() -> None:
    model, batches = llama(), sentences(1)
    assert [name.split(".")[-1] for name in calibrate(model, batches, "*.1.mlp.*")] == [
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert list(calibrate(model, batches, lambda name, module: name == "lm_head")) == ["lm_head"]
    with pytest.raises(ValueError, match=r"the glob '\*.fc' matches nothing"):
        calibrate(model, batches, "*.fc")
    with pytest.raises(ValueError, match="found none among 5 modules"):
        calibrate(model, batches, "*norm*")


def test_a_model_that_is_one_layer_has_no_name() -> None:
    calibration = calibrate(nn.Linear(6, 2), batches_of(5, 6))
    check(calibration[""], rows_of(batches_of(5, 6)))
    assert "(model)" in calibration.table()


def test_a_compiled_model_is_measured_as_it_was_without_compiling_anything() -> None:
    def backend(graph: Any, example: Any) -> Any:
        raise AssertionError("compiled")

    model = mlp()
    compiled = torch.compile(model, backend=backend)
    calibration, plain = calibrate(compiled, batches_of(5, 6)), calibrate(model, batches_of(5, 6))
    assert list(calibration) == list(plain) == ["0", "2"]
    assert [stats.bits() for stats in calibration.values()] == [stats.bits() for stats in plain.values()]
    with pytest.raises(Exception, match="compiled"):
        compiled(torch.randn(5, 6))


def test_inputs_that_cannot_be_measured_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(6, 2, dtype=torch.complex64))
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"0 input cannot be measured: .* got torch.complex64"):
        calibrate(model, [torch.randn(5, 6, dtype=torch.complex64)])
    assert state_of(model) == before


def partly_frozen() -> nn.Sequential:
    """With dropout, in training mode but for one part."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)))
    model[2][0].eval()
    return model.train() and model


def state_of(model: nn.Module) -> dict[str, Any]:
    """Modes and hooks of all modules, and the bits of all tensors."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [list(vars(module)[kind].values()) for kind in hooks] for name, module in model.named_modules()
        },
        "tensors": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
    }


def test_a_module_that_two_share_is_in_its_own_mode_afterwards() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared).eval())
    shared.train()
    calibrate(model, batches_of(5, 6))
    assert [module.training for module in (model, model[0], model[1], shared)] == [True, True, False, True]


class Broken(RuntimeError):
    pass


def failing(where: str, model: nn.Module) -> Iterator[torch.Tensor]:
    yield from batches_of(5, 6, count=2)
    if where == "batches":
        raise Broken
    yield torch.randn(5, 7) if where == "model" else torch.randn(5, 6)


@pytest.mark.parametrize("where", ["nowhere", "batches", "model", "forward"])
def test_modes_hooks_and_gradients_are_as_before_also_after_an_error(where: str) -> None:
    model = partly_frozen()
    model[2][0].eval()
    model[0].register_forward_hook(lambda module, args, output: None)
    before = state_of(model)
    assert len(set(before["modes"].values())) == 2
    seen = []

    def forward(model: nn.Module, batch: torch.Tensor) -> None:
        output = model(batch)
        seen.append((any(module.training for module in model.modules()), output.requires_grad))
        if where == "forward" and len(seen) == 2:
            raise Broken

    if where == "nowhere":
        calibrate(model, failing(where, model), forward=forward)
    else:
        with pytest.raises(RuntimeError if where == "model" else Broken):
            calibrate(model, failing(where, model), forward=forward)
    assert state_of(model) == before
    assert set(seen) == {(False, False)}
    assert torch.is_grad_enabled()
    assert model(torch.randn(5, 6)).requires_grad


def test_another_monitor_goes_on_and_does_not_see_it() -> None:
    model = mlp()
    with hookstats.attach(model, tensors=("output",), every=1) as monitor:
        model(torch.randn(3, 6))
        calibrate(model, batches_of(5, 6))
        model(torch.randn(4, 6))
        snapshot = monitor.step()
    assert snapshot is not None
    assert snapshot["0", "output"].calls == 2


def test_a_generator_is_read_once_and_no_batch_is_kept() -> None:
    model, alive, inner = mlp(), list[Any](), list[Any]()
    model[1].register_forward_hook(lambda module, args, output: inner.append(weakref.ref(output)))
    most = [0, 0]

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(50):
            batch = torch.randn(5, 6)
            alive.append(weakref.ref(batch))
            yield batch
            del batch
            for i, refs in enumerate((alive, inner)):
                most[i] = max(most[i], sum(each() is not None for each in refs))

    stats = calibrate(model, batches())
    assert stats["2"].tokens == 250
    assert len(alive) == len(inner) == 50
    assert most[0] <= 1
    assert most[1] <= 1


def test_what_is_no_model_no_batches_or_no_function_is_refused() -> None:
    model, batch = mlp(), torch.randn(5, 6)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got dict"):
        calibrate({}, [batch])  # type: ignore[arg-type]
    for wrong in (batch, {"x": batch}, 3):
        with pytest.raises(TypeError, match=r"batches: expected an iterable of batches, such as \[batch\], got"):
            calibrate(model, wrong)
    with pytest.raises(TypeError, match="forward: expected a function"):
        calibrate(model, [batch], forward="model")
    for nothing in ([], iter(())):
        with pytest.raises(ValueError, match="expected at least one batch, got none"):
            calibrate(model, nothing)
    with pytest.raises(ValueError, match="found none among 2 modules"):
        calibrate(nn.Sequential(nn.ReLU()), [batch])


def test_a_table_has_a_line_for_each_layer() -> None:
    x = torch.ones(3, 6)
    x[1, 2], x[2, 0] = -8.0, float("nan")
    calibration = calibrate(Twice(), [(x, False)])
    head, rule, used, unused = calibration.table().splitlines()
    assert head.split() == ["layer", "tokens", "channels", "amax", "p99", "p99.9", "p99.99", "outlier", "nonfinite"]
    assert set(rule) == {"-"}
    assert used.split()[:4] == ["used", "6", "6", "16"]
    assert used.split()[-2:] == ["8.0", "2"]  # 16 over 2, the other channels
    assert unused.split() == ["unused", "0", "6", "-", "-", "-", "-", "-", "0"]
    assert "<b>Calibration(2 layers, 1 without a token)</b>" in calibration._repr_html_()
