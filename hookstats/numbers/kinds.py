"""Kinds of tensors: one table that says what a site's tensor is.

A tensor is a kind ("output"), one of a family ("optimizer.exp_avg"), or what is at a place in a container of a kind
("output.0"); behind it may stand which ranks it is of ("output[tp=1]").
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple


class Kind(NamedTuple):
    """A row of the table.

    ``of``: what it is measured of. Data parallel ranks have a part each of what is of a module, hold replicas of what
    is of a parameter unless it ``is_local``, and each its own buffers. ``one``: in a sentence, with a place in a
    container and a name. ``several``: of many.
    """

    name: str
    of: Literal["module", "parameter", "buffer"]
    one: str
    several: str
    is_input: bool = False  # of what enters a module
    is_gradient: bool = False
    is_update: bool = False  # what an optimizer makes of gradients: a change, or a state that it keeps
    is_sample: bool = False  # of some elements, always the same ones
    is_about: bool = False  # numbers about tensors, of which no format has to hold the values
    is_local: bool = False  # of a parameter, as each rank has it before the ranks share it
    is_part: bool = False  # of which each rank brings a part of its own, wherever its tensors lie

    @property
    def is_replicated(self) -> bool:
        """Return whether data parallel ranks hold the same."""
        return self.of == "parameter" and not self.is_local


_ROWS = (
    Kind("output", "module", "the output{} of {}", "outputs"),
    Kind("grad_output", "module", "the gradient of the output{} of {}", "gradients of outputs", is_gradient=True),
    Kind("input", "module", "the input{} of {}", "inputs", is_input=True),
    Kind(
        "grad_input", "module", "the gradient of the input{} of {}", "gradients of inputs", True, is_gradient=True
    ),
    Kind("param", "parameter", "the parameter{} {}", "parameters"),
    Kind("param_sample", "parameter", "the sample{} of the parameter {}", "samples of parameters", is_sample=True),
    Kind("param_grad", "parameter", "the gradient{} of the parameter {}", "gradients of parameters", is_gradient=True),
    Kind(
        "param_grad_local", "parameter", "a rank's own gradient{} of the parameter {}", "ranks' own gradients",
        is_gradient=True, is_local=True,
    ),
    Kind(
        "reduction", "parameter", "sampled elements of the gradient{} of the parameter {}", "sampled gradients",
        is_about=True, is_local=True, is_part=True,
    ),
    Kind("param_update", "parameter", "the update{} of the parameter {}", "updates of parameters", is_update=True),
    Kind(
        "update_sample", "parameter", "the sampled update{} of the parameter {}", "sampled updates of parameters",
        is_update=True, is_sample=True,
    ),
    Kind(
        "outside_update", "parameter", "what no optimizer's step changed{} of the sample of the parameter {}",
        "changes between steps of optimizers", is_update=True, is_sample=True,
    ),
    Kind(
        "optimizer_law", "parameter", "what a step did{} to the parameter {} over what the formula says",
        "steps over what formulas say", is_update=True, is_sample=True, is_about=True,
    ),
    Kind("optimizer", "parameter", "the optimizer's{} of the parameter {}", "states of optimizers", is_update=True),
    Kind(
        "identity", "parameter", "the sums of an identity{} over the parameter {}", "sums of weights times gradients",
        is_about=True, is_local=True, is_part=True,
    ),
    Kind("buffer", "buffer", "the buffer{} {}", "buffers"),
    Kind("buffer_sample", "buffer", "the sample{} of the buffer {}", "samples of buffers", is_sample=True),
    Kind(
        "token_weights", "module", "the token weights'{} of the loss of {}", "weights of tokens in losses",
        is_gradient=True, is_about=True,
    ),
    Kind("adjoint", "module", "the adjoint test's{} of {}", "adjoint tests", is_about=True, is_part=True),
    Kind("attention", "module", "the attention's{} of {}", "numbers of attention", is_about=True),
    Kind("router", "module", "the router's{} of {}", "numbers of routers", is_about=True),
)  # fmt: skip
KINDS = {row.name: row for row in _ROWS}  # in the order in which `attach` knows them


@lru_cache(maxsize=1 << 16)
def kind_of(tensor: str) -> Kind:
    """The row of a site's tensor. What is none of ours, as that of `measure`, is taken for one of a module."""
    name = tensor.partition("[")[0].partition(".")[0]
    return KINDS.get(name) or Kind(name, "module", f"{name}{{}} of {{}}", f"{name}s")


def is_of_kind(tensor: str, kind: str) -> bool:
    """Return whether a tensor is of a kind, or of one in a family: "output.0" is an "output"."""
    return tensor == kind or f"{tensor.partition('[')[0]}.".startswith(f"{kind}.")


def is_of_module(tensor: str) -> bool:
    """Return whether it is an activation, or its gradient: neither of a parameter nor a buffer."""
    return kind_of(tensor).of == "module"


def has_rows(name: str, tensor: str) -> bool:
    """Return whether a site has rows of which some may stand for all, such as tokens: an activation, or its gradient.

    The model's input is none: rules compare its batches to the bit.
    """
    kind = kind_of(tensor)
    return kind.of == "module" and not kind.is_about and (bool(name) or not kind.is_input)
