"""Heads instead of channels: groups of channels, merged, and how many heads a model says that there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookstats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("groups", [1, 3, 4, 12])
def test_groups_are_what_float64_says_of_the_reshaped_tensor(dtype: torch.dtype, groups: int) -> None:
    torch.manual_seed(0)
    means = torch.arange(12.0) * 1e4  # far apart, against deviations of 1
    x = (torch.randn(50, 12) + means).to(dtype)
    x[0, 0], x[1, 5], x[2, 11] = torch.nan, torch.inf, 0
    found = hookstats.measure(x, -1).grouped(groups)
    for number, part in enumerate(x.double().unflatten(-1, (groups, -1)).unbind(1)):
        finite = part[part.isfinite()]
        assert found.count[number] == len(finite)
        assert found.mean[number] == pytest.approx(finite.mean().item(), rel=1e-6)
        assert found.std[number] == pytest.approx(finite.std().item(), rel=1e-4)
        assert found.max[number] == finite.max()
        assert found.min[number] == finite.min()
        assert found.zeros[number] == (part == 0).sum()
        assert found.nans[number] == part.isnan().sum()
        assert found.posinfs[number] == part.isposinf().sum()


def test_what_is_no_number_of_groups_is_refused() -> None:
    stats = hookstats.measure(torch.randn(4, 12), -1)
    with pytest.raises(ValueError, match="expected a number that divides the 12 channels, got 5"):
        stats.grouped(5)
    with pytest.raises(ValueError, match="got 0"):
        stats.grouped(0)
    with pytest.raises(TypeError, match=r"expected an int, got 2\.0"):
        stats.grouped(2.0)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(4, 4))
    with hookstats.attach(model, channels=False) as monitor:
        model(torch.randn(2, 4))
        with pytest.raises(ValueError, match="grouped: expected statistics per channel, got totals alone"):
            monitor.snapshot()["0", "output"].grouped(2)


def test_heads_of_grouped_queries() -> None:
    pytest.importorskip("transformers")
    from tests.language import zoo

    model = zoo.make("llama")
    model.config.num_key_value_heads = 2
    found = hookstats.presets.heads(model)
    assert {name.removeprefix("model.layers."): count for name, count in found.items()} == {
        f"{layer}.self_attn.{part}": 4 if part == "q_proj" else 2
        for layer in (0, 1)
        for part in ("q_proj", "k_proj", "v_proj")
    }
    with hookstats.attach(model) as monitor:
        model(**zoo.batch())
        snapshot = monitor.snapshot()
    for name, count in found.items():
        assert snapshot[name, "output"].grouped(count).rms.shape == (count,)
    assert hookstats.presets.heads(zoo.make("gpt2")) == {}  # queries, keys and values lie together
    with pytest.raises(TypeError, match=r"heads: expected a torch\.nn\.Module, got int"):
        hookstats.presets.heads(3)  # type: ignore[arg-type]
