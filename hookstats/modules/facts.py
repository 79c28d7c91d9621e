"""Facts of a model before it runs: frozen parameters, modules in evaluation mode, what no module has. Knows torch.

`facts` are of use to whoever reads them; what `find_hidden` returns is nearly always a mistake.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn

from hookstats.modules.selection import clean_names

_SHOWN = 3  # names
_MOST = 10_000  # of a container's elements that are looked at


def facts(model: nn.Module) -> list[str]:
    """Sentences on a model: dtypes where there are several, frozen parameters, evaluation mode, tied parameters."""
    parameters = [each for each in model.parameters() if not nn.parameter.is_lazy(each)]
    size = sum(each.numel() for each in parameters)
    found = []
    of_dtype: Counter[str] = Counter()
    for each in parameters:
        of_dtype[str(each.dtype).removeprefix("torch.")] += each.numel()
    if len(of_dtype) > 1:
        found.append(
            "parameters are " + ", ".join(f"{_compute_share(n, size)} {dtype}" for dtype, n in of_dtype.most_common())
        )
    frozen = sum(each.numel() for each in parameters if not each.requires_grad)
    if frozen:
        found.append(f"{_compute_share(frozen, size)} of {size:,} parameter values are frozen")
    resting = _find_in_evaluation(model)
    if resting:
        found.append(f"in evaluation mode: {_list_names(resting)}")
    tied = _find_tied(model)
    if tied:
        found.append(f"tied: {_list_names([' = '.join(names) for names in tied])}")
    return found


def find_hidden(model: nn.Module) -> list[str]:
    """Sentences on modules and parameters that require gradients and are no part of the model, because a list, a tuple
    or a dict holds them: an optimizer that is made of ``model.parameters()`` does not have them. What is kept in an
    attribute that begins with "_" is meant to be so."""
    own = {id(each) for each in model.parameters()}
    found = []
    for name, module in clean_names(model).items():
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("_"):
                continue
            lost = {id(each): each for each in _list_parameters(value) if each.requires_grad and id(each) not in own}
            if lost:
                size = sum(each.numel() for each in lost.values() if not nn.parameter.is_lazy(each))
                place = f"{name}.{attribute}".lstrip(".")
                values = f"{size:,} values" if size else "parameters"
                kind = type(value).__name__
                found.append(
                    f"{place}, a {kind}, has {values} that require gradients and are in no module of the model"
                )
    return found


def _list_parameters(value: Any) -> Iterator[nn.Parameter]:
    """Return the parameters in a container that torch does not look into."""
    if type(value) in (list, tuple):
        held = list(value[:_MOST])
    elif type(value) is dict:
        held = list(value.values())[:_MOST]
    else:
        return
    for each in held:
        if isinstance(each, nn.Module):
            yield from each.parameters()
        elif isinstance(each, nn.Parameter):
            yield each


def _find_in_evaluation(model: nn.Module) -> list[str]:
    """The names of modules in evaluation mode, each without those inside of it; "(model)" is the model."""
    found: list[str] = []
    for name, module in clean_names(model).items():
        if not module.training and not (found and name.startswith(f"{found[-1]}.")):
            if name == "":
                return ["(model)"]
            found.append(name)
    return found


def _find_tied(model: nn.Module) -> list[list[str]]:
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, module in clean_names(model).items():  # each once, however the model is knotted
        for own, parameter in module._parameters.items():
            if parameter is not None:
                names[id(parameter)].append(f"{name}.{own}".lstrip("."))
    return [each for each in names.values() if len(each) > 1]


def _compute_share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.3g} %"


def _list_names(names: list[str]) -> str:
    others = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {others} others" if others > 0 else "")
