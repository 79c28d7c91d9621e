"""What a site's tensor is of, by its kind: "optimizer" of "optimizer.exp_avg"."""

from __future__ import annotations

_OF_OPTIMIZERS = ("param_update", "update_sample", "optimizer")
_OF_PARAMETERS = ("param", "param_sample", "param_grad", *_OF_OPTIMIZERS)


def kind_of(tensor: str) -> str:
    """Without its place, "output" of "output.0", and without the ranks that it is of, "output" of "output[tp=1]"."""
    return tensor.partition("[")[0].partition(".")[0]


def is_of_parameter(tensor: str) -> bool:
    """Whether it is measured of a parameter: data parallel ranks hold replicas of it. Not so of buffers."""
    return kind_of(tensor) in _OF_PARAMETERS


def is_of_optimizer(tensor: str) -> bool:
    """Whether it is what an optimizer has made of gradients: an update, or a state that it keeps."""
    return kind_of(tensor) in _OF_OPTIMIZERS


def is_of_module(tensor: str) -> bool:
    """Whether it is an activation, or its gradient: neither of a parameter nor a buffer."""
    return not is_of_parameter(tensor) and kind_of(tensor) != "buffer"
