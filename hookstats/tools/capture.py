"""capture(): a few feature maps and their gradients, kept on the host while a model trains.

    with hookstats.capture(model, ["conv1", "conv3"], every=100) as captured:
        train(model)
    captured["conv1"][-1].output, captured["conv1"][-1].gradient
    captured.plot("conv1").savefig("conv1.png")

Memory is bounded: of each module the last few captures, of each capture a few items and channels, in buffers that are
used again. Nothing waits: from a GPU the copies go to pinned memory, and only reading them waits for them.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from hookstats import _native
from hookstats._warn import warn
from hookstats.modules import order
from hookstats.modules.channels import find_channel_dim, find_natural_channels
from hookstats.modules.containers import walk
from hookstats.modules.selection import Modules, find_modules_at
from hookstats.numbers.selection import Globs
from hookstats.tools import pictures


class Capture(NamedTuple):
    """A captured call of a module. Tensors on the CPU: the first items and channels of the model's, in their dtype."""

    call: int  # which call of the module, from 0; recomputations are none
    output: torch.Tensor  # before edits, but for those made with after=True
    gradient: torch.Tensor | None  # of that output; None: none has come


def capture(
    model: nn.Module,
    modules: Globs | Callable[[str, nn.Module], bool],
    *,
    exclude: Modules = None,
    every: int = 1,
    items: int = 1,
    channels: int = 16,
    keep: int = 4,
) -> Captured:
    """Keeps outputs of modules and the gradients of those outputs.

    Args:
        model: any module, compiled ones included.
        modules: globs over module names (``"layers.*.mlp"``; ``*`` crosses dots), or a callable ``(name, module) ->
            bool``. The first floating tensor of a tuple, list, dict or dataclass is kept.
        exclude: globs or a callable; the chosen modules are left out, with everything inside them.
        every: n, to keep every n-th call of a module, from call 0 on.
        items: the number of items of a batch (the first dimension) that are kept.
        channels: the number of channels that are kept, along the dimension that `attach` finds for them.
        keep: the number of captures of each module; a new one replaces the oldest.

    Raises:
        TypeError, ValueError: for arguments that are not as above; for a glob that matches nothing, or only modules
            that are never called.
    """
    for name, number in (("every", every), ("items", items), ("channels", channels), ("keep", keep)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}: expected an int from 1, got {number!r}")
    rings: dict[str, _Ring] = {}
    handles: list[order.Hanging] = []
    captured = Captured(rings, handles)
    try:
        for name, module in find_modules_at(model, modules, exclude).items():
            ring = rings[name] = _Ring(name, every, keep, items, channels, find_natural_channels(module).dim)
            handles.append(order.register(module, _OutputHook(ring)))
    except Exception:
        captured.remove()
        raise
    order.make_room_for_graphs()
    return captured


class Captured(Mapping[str, list[Capture]]):
    """Result of `capture`: a list of Captures for each module, by its clean name.

    As a context manager, it is removed at the end; what was captured stays.
    """

    def __init__(self, rings: dict[str, _Ring], handles: list[order.Hanging]) -> None:
        self._rings = rings
        self._handles = handles

    def __getitem__(self, name: str) -> list[Capture]:
        """The captures of a module, the oldest first. Waits for the copies; the tensors are the caller's own."""
        if name not in self._rings:
            raise KeyError(f"expected one of {', '.join(map(repr, self._rings))}; got {name!r}")
        return self._rings[name].captures()

    def __iter__(self) -> Iterator[str]:
        return iter(self._rings)

    def __len__(self) -> int:
        return len(self._rings)

    def __contains__(self, name: object) -> bool:
        return name in self._rings  # nothing is copied, as it would be by Mapping's own

    __eq__ = object.__eq__  # Mapping's own would compare tensors
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Captured({', '.join(name or '(model)' for name in self)})"

    def plot(self, name: str, index: int = -1, item: int = 0) -> Any:
        """A picture of one capture: the output's channels, and their gradients.

        Args:
            name: a module.
            index: which of its captures.
            item: which item of the batch.

        Returns a ``matplotlib.figure.Figure`` that a notebook shows. Raises KeyError or IndexError where there is no
        such capture or item, ImportError without matplotlib (``pip install 'hookstats[report]'``).
        """
        shot = self[name][index]
        return pictures.draw_feature_maps(
            f"{name or '(model)'}, call {shot.call}",
            {
                label: self._rings[name].item(tensor, item)
                for label, tensor in (("output", shot.output), ("gradient", shot.gradient))
                if tensor is not None
            },
        )

    def remove(self) -> None:
        """Takes the hooks off the model. Gradients that are still to come are kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        order.make_room_for_graphs()

    def __enter__(self) -> Captured:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class _Buffer:
    """A tensor's place on the host, used again for the next one of the same shape."""

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self.full = False

    def fill(self, x: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            x = x.detach()
            if self._copied is not None and x.is_cuda:  # on another stream, the copy before may still be under way
                torch.cuda.current_stream(x.device).wait_event(self._copied)
            if self._host is None or (self._host.shape, self._host.dtype) != (x.shape, x.dtype):
                self._host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
            self._host.copy_(x, non_blocking=True)
        if x.is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(x.device))
        self.full = True

    def read(self) -> torch.Tensor | None:
        if not self.full or self._host is None:
            return None
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.clone()


class _KeptCapture:
    """A capture that is kept."""

    def __init__(self) -> None:
        self.call = -1
        self.output, self.gradient = _Buffer(), _Buffer()

    def begin(self, call: int) -> None:
        self.call = call
        self.output.full = self.gradient.full = False


class _Ring:
    """The captures of one module."""

    _indices = itertools.count()

    def __init__(self, name: str, every: int, keep: int, items: int, channels: int, channel_dim: int | None) -> None:
        self._name = name
        self._warned = False
        self._every = every
        self._items = items
        self._channels = channels
        self._channel_dim = channel_dim
        self._slots: deque[_KeptCapture] = deque(maxlen=min(keep, sys.maxsize))  # the latest last
        self._calls = 0
        self.token = torch.tensor(next(self._indices))  # its index, for operators
        _rings[int(self.token)] = self

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """The items and channels of a tensor that are kept."""
        if x.dim() == 0:
            return x
        dim = find_channel_dim(x, self._channel_dim) % x.dim()
        x = x.narrow(dim, 0, min(self._channels, x.shape[dim]))
        return x if dim == 0 else x[: self._items]

    def item(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return an item of what is kept, with its channels first if it is an image."""
        dim = find_channel_dim(x, self._channel_dim) % x.dim() if x.dim() else 0
        if dim:
            x, dim = x[number], dim - 1
        return x.movedim(dim, 0) if x.dim() == 3 else x

    def first_floating(self, output: Any) -> torch.Tensor | None:
        """Return the tensor of an output that is kept. None: of a wrapper, or while a CUDA graph is captured."""
        if torch.compiler.is_compiling():
            return _find_first_floating(output)
        try:
            x = _find_first_floating(output)
        except Exception as error:  # a container that cannot be walked
            self._warn(error)
            return None
        if x is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        if _native.has_no_data(x):
            if type(x).__name__ != "FakeTensor":
                self._warn(TypeError(f"expected a plain tensor with data, got {type(x).__name__} on {x.device}"))
            return None
        return x

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warn(f"not captured: {self._name or '(model)'}: {type(error).__name__}: {error}")

    def _fill(self, buffer: _Buffer, x: torch.Tensor) -> None:
        try:
            buffer.fill(self.share(x))
        except Exception as error:  # no memory, say: training goes on
            self._warn(error)

    def put_output(self, x: torch.Tensor) -> _KeptCapture | None:
        """The capture that this output, or its recomputation, belongs to; None if this call is not kept."""
        if _native.backward_is_running():
            return self._find_recomputed()
        call = self._calls
        self._calls += 1
        if call % self._every:
            return None
        slot = self._slots[0] if len(self._slots) == self._slots.maxlen else _KeptCapture()
        self._slots.append(slot)  # in the place of the oldest
        slot.begin(call)
        self._fill(slot.output, x)
        return slot

    def put_gradient(self, g: torch.Tensor, slot: _KeptCapture | None, call: int) -> None:
        if slot is not None and slot.call == call:  # not yet taken by a later capture
            self._fill(slot.gradient, g)

    def find_newest(self) -> _KeptCapture | None:
        """The capture of the last call, if that was kept and its gradient has not come yet."""
        slot = self._slots[-1] if self._slots else None
        return slot if slot and slot.call == self._calls - 1 and not slot.gradient.full else None

    def _find_recomputed(self) -> _KeptCapture | None:
        """The capture that is recomputed. None where several wait for gradients: nothing says whose turn it is."""
        waiting = [slot for slot in list(self._slots) if slot.output.full and not slot.gradient.full]
        return self.find_newest() if len(waiting) == 1 else None

    def captures(self) -> list[Capture]:
        found = []
        for slot in list(self._slots):  # a copy, which nothing interrupts: another thread may train meanwhile
            output = slot.output.read()
            if output is not None:
                found.append(Capture(slot.call, output, slot.gradient.read()))
        return found


_rings: WeakValueDictionary[int, _Ring] = WeakValueDictionary()


def _put_from_graph(x: torch.Tensor, token: torch.Tensor, what: str) -> None:
    """Keep a tensor of a graph. Nothing says there to which call a gradient belongs: it goes to the last one."""
    ring = _rings.get(int(token))
    if ring is None:
        return
    if what == "output":
        ring.put_output(x)
    else:
        slot = ring.find_newest()
        ring.put_gradient(x, slot, slot.call if slot else -1)


# The token is said to be changed, so that no compiler leaves this out. Not into CUDA graphs: replays would not come by.
_capture = _native.operator(
    "capture(Tensor x, Tensor(a!) token, str what) -> ()", _put_from_graph, torch.Tag.cudagraph_unsafe
)


class _OutputHook(order.ModuleHook):
    description = "capture"

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        ring = self.ring
        x = ring.first_floating(output)
        if x is None:
            return
        has_gradient = x.requires_grad and not x.is_leaf
        if torch.compiler.is_compiling():
            _capture(ring.share(x.detach()), ring.token, "output")
            if has_gradient:
                x.register_hook(lambda g: _capture(ring.share(g), ring.token, "gradient"))
            return
        slot = ring.put_output(x)
        if slot is not None and has_gradient:
            call = slot.call
            x.register_hook(lambda g: ring.put_gradient(g, slot, call))


def _find_first_floating(output: Any) -> torch.Tensor | None:
    return next((tensor for _, tensor in walk(output) if tensor.is_floating_point()), None)
