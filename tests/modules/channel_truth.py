"""True channels of each site, found without hookstats: the entries that a change of one channel changes.

One channel of a layer whose own channels are known by its documentation (or one entry of a vector among a module's own
parameters) is changed; what then differs in a later output lies in one place along the dimension of its channels, and
in many places along every other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from tests.plain import leaves

Site = tuple[str, str]  # the module's name, ".path" in its output


# What no change shows, because it holds no learned channel, or mixes them all: by the names of types, and with paths in
# the output. None: there are no channels in it.
WRITTEN = {
    "*RotaryEmbedding": -1,
    "*PositionEmbeddings": -1,
    "*TopKRouter": -1,  # experts
    "*Experts": -1,
    "*MoeDecoderLayer": -1,
    "MixtralDecoderLayer": -1,
    "GptOssDecoderLayer": -1,
    "FNetBasicFourierTransform": -1,
    "*RelativePositionBias": 1,  # heads
    "T5*.[12]": 1,
    "LSTM": -1,
    "GRU": -1,
    "MultiheadAttention.0": -1,
    "EncodecLSTM": 1,
    "EncodecConv1d": 1,
    "WavLM*.1": None,  # positions by positions, for each head of each sequence
}
# The same by the names of modules.
WRITTEN_AT = {
    "*.experts.act_fn": -1,
    "encoder.albert_layer_groups.*": -1,
    "embeddings.padding": 1,  # of an image
    "decoder.tanh": 1,  # of sound with one channel
}


def written(module: nn.Module, path: str) -> int | None:
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)):
        return module.dim
    names = type(module).__name__, type(module).__name__ + path
    return next((dim for glob, dim in WRITTEN.items() if any(fnmatchcase(name, glob) for name in names)), None)


def written_at(name: str) -> int | None:
    return next((dim for glob, dim in WRITTEN_AT.items() if fnmatchcase(name, glob)), None)


def has_channels(module: nn.Module, path: str, tensor: torch.Tensor) -> bool:
    name = type(module).__name__ + path
    return tensor.dim() > 0 and not any(dim is None and fnmatchcase(name, glob) for glob, dim in WRITTEN.items())


def documented(module: nn.Module) -> int | None:
    """The channel dimension of a torch.nn layer's output, from its documentation."""
    if isinstance(module, (nn.Linear, nn.Embedding)):  # what derives from them, too
        return -1
    for cls in type(module).__mro__:
        name = cls.__name__
        if cls.__module__.startswith("torch.nn.modules") and name.startswith(("Conv", "ConvTranspose", "BatchNorm")):
            return -1 - int(name[-2])
    name = type(module).__name__
    if not type(module).__module__.startswith("torch.nn.modules"):
        return None
    if name in ("LayerNorm", "RMSNorm"):
        return -1
    if name.startswith("InstanceNorm") or "Pool" in name:
        return -1 - int(name[-2])
    return 1 if name == "GroupNorm" else None


class Run:
    """One forward: the outputs of the watched modules, in the order in which they came."""

    def __init__(
        self, model: nn.Module, inputs: dict[str, Any], watched: Mapping[str, nn.Module], changed: Any = None
    ) -> None:
        """changed: None, or (module, channel dimension): channel 1 of its output is changed."""
        self.outputs: list[tuple[Site, torch.Tensor]] = []
        handles = []
        if changed is not None:
            handles.append(changed[0].register_forward_hook(lambda m, a, y: _moved(y, changed[1])))
        for name, module in watched.items():
            handles.append(module.register_forward_hook(self._keep(name)))
        torch.default_generator.manual_seed(1)
        with torch.no_grad():
            model(**inputs)
        for handle in handles:
            handle.remove()

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.outputs += [((name, path), tensor.clone()) for path, tensor in leaves(output)]

        return hook


def _moved(y: Any, dim: int) -> Any:
    if not isinstance(y, torch.Tensor):
        return None
    y = y.clone()
    y.select(dim, 1 % y.shape[dim]).add_(3.0)
    return y


def touched(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    """The dimensions along which exactly one place, of several, differs. Empty where nothing differs."""
    if before.shape != after.shape or torch.equal(before, after):  # as most are, and quickly seen
        return set()
    differs = ~((before == after) | (before.isnan() & after.isnan()))
    if not differs.any():
        return set()
    found = set()
    for dim in range(differs.dim()):
        places = int(differs.movedim(dim, 0).flatten(1).any(1).sum()) if differs.dim() > 1 else int(differs.sum())
        if differs.shape[dim] > 1 and places == 1:
            found.add(dim)
    return found


def truth(
    model: nn.Module, inputs: dict[str, Any], watched: Mapping[str, nn.Module]
) -> tuple[dict[Site, set[int]], dict[Site, list[torch.Size]]]:
    """By site: the dimensions that may be called its channels (empty: none was found), and the shapes that it had."""
    plain = Run(model, inputs, watched)
    shapes: dict[Site, list[torch.Size]] = {}
    for site, tensor in plain.outputs:
        shapes.setdefault(site, []).append(tensor.shape)
    found: list[set[int]] = [set() for _ in plain.outputs]
    named = dict(model.named_modules())
    order: list[nn.Module] = []
    handles = [m.register_forward_hook(lambda m, a, y: order.append(m)) for m in named.values()]
    torch.default_generator.manual_seed(1)
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()

    def compare(run: Run) -> None:
        """Keep the dimensions in which this run differs. Later runs override earlier ones: their modules are nearer."""
        if [site for site, _ in run.outputs] != [site for site, _ in plain.outputs]:
            return
        for i, ((_, before), (_, after)) in enumerate(zip(plain.outputs, run.outputs, strict=True)):
            dims = touched(before, after)
            if dims:
                found[i] = dims

    for module in dict.fromkeys(order):
        dim = documented(module)
        if dim is None and not isinstance(module, (nn.Softmax, nn.LogSoftmax)):
            dim = written(module, "")
        if dim is not None:
            compare(Run(model, inputs, watched, (module, dim)))
        for vector in module.parameters(recurse=False):
            if dim is None and vector.dim() == 1 and vector.numel() > 1:
                with torch.no_grad():
                    before = vector.clone()
                    vector[1] += 3.0
                    compare(Run(model, inputs, watched))
                    vector.copy_(before)
    result: dict[Site, set[int]] = {}
    for (site, tensor), dims in zip(plain.outputs, found, strict=True):
        module = watched[site[0]]
        if not has_channels(module, site[1], tensor):
            continue
        own = None if site[1] else documented(module)
        if own is None and not dims:
            own = written_at(site[0]) if written(module, site[1]) is None else written(module, site[1])
        if own is not None:
            dims = {own % tensor.dim()}
        result[site] = result[site] & dims if site in result else dims
    return result, shapes
