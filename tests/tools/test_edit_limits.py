"""Edits: what they count, refuse, and leave behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hookstats import edit
from tests.models import images, small_cnn
from tests.tools.edits import assert_close, compile_with, differ, residual, run, scale_by, zero_below
from tests.watch.test_attach import state_of

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning"),
]


def test_changed_counts_what_is_different_afterwards() -> None:
    x = torch.tensor([float("nan"), float("inf"), 0.0, -0.0, 0.2, -0.2, 3.0])
    model = nn.Identity()
    mask = edit(model, "", zero_below(0.5))
    assert model(x)[1:].tolist() == [float("inf"), 0, 0, 0, 0, 3]
    assert mask.changed == 2
    repaired = edit(model, "", torch.nan_to_num)
    model(x)
    assert (mask.changed, repaired.changed) == (4, 2)


def test_what_has_no_data_of_its_own_is_edited_but_not_counted() -> None:
    model = nn.Linear(3, 3)
    mask = edit(model, "", zero_below(100))
    scale = edit(model, "", scale_by(2), "grad_output")
    assert not torch.vmap(model)(torch.randn(4, 3)).any()
    with torch.device("meta"):
        assert nn.Sequential(model.to("meta"))(torch.randn(4, 3)).device.type == "meta"
    assert (mask.changed, scale.changed) == (0, 0)


def test_a_graph_on_another_device_than_the_edit_is_refused() -> None:
    model = nn.Linear(3, 3)
    edit(model, "", zero_below(1))
    model.to("meta")
    with pytest.raises(RuntimeError, match=r"expected tensors on cpu, .* got one on meta: make edits after model.to()"):
        compile_with(model, "eager")(torch.randn(2, 3, device="meta"))


def test_without_a_gradient_there_is_nothing_to_edit() -> None:
    model = small_cnn()
    scale = edit(model, "*", scale_by(2), "grad_output")
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(images())
    assert scale.changed == 0


@pytest.mark.parametrize("tensor", ["output", "input", "grad_output", "grad_input"])
def test_remove_leaves_the_model_as_it_was(tensor: str) -> None:
    model = residual()
    before = state_of(model)
    bare = run(model, steps=1)
    model.zero_grad()
    made = edit(model, "*", lambda t: t * 0.5, tensor)
    assert state_of(model) != before
    assert differ(run(model, steps=1), bare)
    made.remove()
    made.remove()
    assert state_of(model) == before
    model.zero_grad()
    assert_close(run(model, steps=1), bare, exact=True)
    with pytest.raises(RuntimeError, match="normalized_shape"), edit(model, "*", torch.sin, tensor):
        model(torch.randn(2, 9, 9))
    assert state_of(model) == before


def test_a_gradient_that_arrives_after_remove_is_not_edited() -> None:
    x = torch.ones(3, requires_grad=True)
    model = nn.Tanh()
    scale = edit(model, "", scale_by(0), "grad_output")
    loss = model(x).sum()
    scale.remove()
    loss.backward()
    assert x.grad.all()
    assert scale.changed == 0


def test_copies_of_the_model_are_without_edits() -> None:
    model = residual()
    bare = run(copy.deepcopy(model))
    made = [edit(model, "*", zero_below(1), tensor) for tensor in ("output", "input")]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(run(twin), bare, exact=True)
    assert [one.changed for one in made] == [0, 0]


def test_where_one_module_takes_no_hooks_none_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    before = state_of(model[:1])
    with pytest.raises(RuntimeError, match="not supported on ScriptModules"):
        edit(model, "*", scale_by(2), "grad_output")
    assert state_of(model[:1]) == before


def test_a_list_of_modules_is_refused_as_it_is_never_called() -> None:
    with pytest.raises(ValueError, match=r"'blocks' matches only 'blocks', .* a ModuleList is never called"):
        edit(residual(), "blocks", torch.sin)


def test_what_cannot_be_edited_says_so_when_the_model_runs() -> None:
    model = nn.Sequential(nn.Embedding(5, 4))
    edit(model, "0", zero_below(1), "input")
    with pytest.raises(TypeError, match=r"expected a floating tensor as input of 0, got input.0 torch.int64"):
        model(torch.tensor([1, 2]))
    for fn, error, message in (
        (lambda t: t[..., :2], ValueError, r"return torch.float32 \[3, 4\] for output of \(model\), got .* \[3, 2\]"),
        (lambda t: t.double(), ValueError, "got torch.float64"),
        (lambda t: None, TypeError, "expected fn to return a tensor, got NoneType"),
    ):
        with edit(linear := nn.Linear(4, 4), "", fn), pytest.raises(error, match=message):
            linear(torch.randn(3, 4))
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    with pytest.raises(ValueError, match=r"'\*.out_proj' matches only '0.out_proj', whose hooks never run"):
        edit(attention, "*.out_proj", scale_by(2), "grad_output")
