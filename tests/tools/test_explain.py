"""explain(): that every hook is listed in its order, and that what it warns of is what happens."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import edit
from tests.models import THREE_KINDS, Residual, images, small_cnn
from tests.tools.edits import clip_to, scale_by, zero_below

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*non-full backward hook.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


def looks(*given: Any) -> None:
    """A hook that changes nothing."""


def test_every_hook_is_listed_in_the_order_in_which_it_runs() -> None:
    model = Residual()
    up = model.blocks[0].up
    ran: list[str] = []

    def name_hook(name: str) -> Any:
        def note(*given: Any) -> None:
            ran.append(name)

        note.__qualname__ = name
        return note

    up.register_forward_hook(name_hook("third"))
    up.register_forward_pre_hook(name_hook("first"))
    up.register_forward_hook(name_hook("second"), prepend=True)
    up.register_full_backward_pre_hook(name_hook("fourth"))
    up.register_full_backward_hook(name_hook("fifth"))
    up.weight.register_hook(name_hook("of the weight"))
    up.weight.register_post_accumulate_grad_hook(name_hook("of its .grad"))
    rows = hookstats.explain(torch.compile(model, backend="eager")).rows  # type: ignore[arg-type]
    model(torch.randn(2, 3, 16)).sum().backward()
    assert [row.hook.split(" (")[0].removeprefix("tests.tools.test_explain.") for row in rows] == [
        *("first", "second", "third", "fourth", "fifth"),
        *("of the weight", "of its .grad"),
    ]
    assert set(ran) == {row.hook.split(" (")[0].removeprefix("tests.tools.test_explain.") for row in rows}
    assert ran[:4] == ["first", "second", "third", "fourth"]
    assert [(row.name, row.kind) for row in rows] == [
        ("blocks.0.up", "forward-pre"),
        ("blocks.0.up", "forward"),
        ("blocks.0.up", "forward"),
        ("blocks.0.up", "full backward-pre"),
        ("blocks.0.up", "full backward"),
        ("blocks.0.up.weight", "gradient"),
        ("blocks.0.up.weight", "gradient in .grad"),
    ]
    assert not any(row.is_ours or row.traps for row in rows)
    assert all(row.hook.endswith(f"({__file__}:{name_hook('').__code__.co_firstlineno})") for row in rows)


def test_our_hooks_say_what_they_are() -> None:
    model = small_cnn()
    edit(model, "0", scale_by(0.5), "grad_output")
    edit(model, "0", zero_below(0.1), after=True)
    hookstats.attach(model, "0", tensors=THREE_KINDS)
    hookstats.capture(model, "0")
    edit(model, "0", clip_to(None, 1), "grad_input")
    rows = hookstats.explain(model).rows
    assert [row.hook for row in rows] == [
        "hookstats.edit(fn=clip_to.<locals>.clip) of grad_input",
        "hookstats.edit(fn=zero_below.<locals>.zero) of output",
        "hookstats.attach",
        "hookstats.capture",
        "hookstats.edit(fn=scale_by.<locals>.scale) of grad_output",
    ]
    assert all(row.is_ours and not row.traps for row in rows)


def traps(model: nn.Module) -> list[str]:
    return [trap for row in hookstats.explain(model).rows for trap in row.traps]


def test_the_old_backward_hook_is_pointed_out_and_does_see_the_last_operation_only() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    shapes: list[torch.Size] = []
    model.register_backward_hook(lambda m, grads, _: shapes.extend(g.shape for g in grads if g is not None))
    leaf = nn.Linear(2, 2)
    leaf.register_backward_hook(looks)
    (old, lambda_returns) = traps(model)
    assert old == "deprecated register_backward_hook: of all that is in this module, it sees the last operation only"
    assert "may return" in lambda_returns
    assert "grad_input is that of the module's last operation, not the module's" in traps(leaf)[0]
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert torch.Size((3, 4)) not in shapes  # the gradient of the module's input is not among them


@pytest.mark.parametrize(
    ("build", "name", "said"),
    [
        (small_cnn, "1", "'2', which comes next, works in place"),
        (small_cnn, "2", "the module works in place"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.ReLU(True))),
            "1",
            "'1.0', which comes first in it",
        ),
        (lambda: nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1)), nn.ReLU(True)), "0", "'1', which comes next"),
        (small_cnn, "0", None),
        (small_cnn, "4", "the module works in place"),
        (small_cnn, "5", None),
    ],
)
def test_full_backward_hooks_are_pointed_out_where_in_place_neighbours_make_them_raise(
    build: Any, name: str, said: str | None
) -> None:
    model = build()
    model.get_submodule(name).register_full_backward_hook(looks)
    if said is None:
        assert traps(model) == []
        model(images()).sum().backward()
    else:
        assert said in traps(model)[0]
        with pytest.raises(RuntimeError, match="modified inplace"):
            model(images()).sum().backward()


def test_hooks_on_modules_that_are_never_called_are_pointed_out() -> None:
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(4, 4)]), "attention": nn.MultiheadAttention(4, 2)})
    for module in (model["list"], model["attention"].out_proj):
        module.register_forward_hook(looks)
    rows = hookstats.explain(model).rows
    assert [row.name for row in rows] == ["list", "attention.out_proj"]
    assert "never runs: a ModuleList is never called" in rows[0].traps[0]
    assert "never runs: MultiheadAttention uses its weight without calling it" in rows[1].traps[0]


class Doubles:
    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return 2 * output

    def looks(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output is None:
            return
        output.sum()


def test_hooks_that_may_return_something_are_pointed_out() -> None:
    for hook, returns in (
        (Doubles(), True),
        (functools.partial(lambda scale, m, args, out: scale * out, 2), True),
        (lambda m, args, out: None, False),
        (lambda m, args, out: 0, True),
        (looks, False),
        (functools.partial(looks, 1), False),
        (Doubles().looks, False),
        (print, False),  # not Python's code: nothing is known of it
    ):
        model = nn.Linear(2, 2)
        model.register_forward_hook(hook)
        said = ["may return something, which takes the place of the output"] if returns else []
        assert traps(model) == said, hook
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.weight.register_hook(lambda g: g * 2)
    assert [trap.split("place of ")[1] for trap in traps(model)] == ["the input", "the gradient"]


def test_hooks_on_every_module_and_on_wrappers_are_listed() -> None:
    model = torch.compile(small_cnn(), backend="eager")
    handle = torch.nn.modules.module.register_module_forward_hook(looks)
    try:
        model.register_forward_hook(looks)  # type: ignore[attr-defined]
        rows = hookstats.explain(model).rows  # type: ignore[arg-type]
    finally:
        handle.remove()
    assert [row.name for row in rows] == ["(every module)", "(OptimizedModule)"]


def test_the_text_shows_every_row_and_trap() -> None:
    model = small_cnn()
    assert str(hookstats.explain(model)) == "no hooks on 9 modules"
    model[1].register_full_backward_hook(looks)
    model.register_forward_hook(looks)
    hookstats.attach(model, "1", tensors=THREE_KINDS)
    lines = str(hookstats.explain(model)).splitlines()
    assert lines[2].startswith("(model)  forward        tests.tools.test_explain.looks (")
    assert lines[3] == "1        forward        hookstats.attach"
    assert lines[4].startswith("1        full backward  tests.tools.test_explain.looks (")
    assert lines[5].startswith("                        ! a full backward hook makes a view")
    assert [row.name for row in hookstats.explain(model).traps] == ["1"]
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got list"):
        hookstats.explain([model])  # type: ignore[arg-type]


def test_a_copy_of_a_watched_model_says_what_its_hooks_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    hookstats.attach(model, tensors=THREE_KINDS)
    (row,) = hookstats.explain(copy.deepcopy(model)).rows
    assert row.hook == "nothing: what a hook of hookstats is in a copy of its model"
    assert not row.traps


def test_an_explanation_shows_itself_in_a_line_and_in_a_notebook_as_its_hooks_and_traps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    model[0].register_full_backward_hook(looks)
    model[0].register_forward_hook(looks)
    found = hookstats.explain(model)
    assert repr(found) == "Explanation(2 hooks on 3 modules, 1 to beware of)"
    page = found._repr_html_()
    assert page.count("<tr>") == 3  # a head, and two hooks
    assert "looks" in page
    (trap,) = found.traps
    assert trap.traps[0].split("'")[0] in page
    empty = hookstats.explain(nn.ReLU())
    assert repr(empty) == "Explanation(0 hooks on 1 modules, 0 to beware of)"
    assert "<table>" not in empty._repr_html_()
