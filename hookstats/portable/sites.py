"""One tensor to its kernel: what a kernel is given, checked. csrc/inputs.cpp and csrc/ops.cpp, in Python."""

from __future__ import annotations

import ctypes
import math
from ctypes import byref, c_int64
from typing import Any, NamedTuple

import torch

from hookstats.portable.devices import Devices, MadeOn, check, keep_for_graphs
from hookstats.portable.library import Input, Layout, Library, State, array

DIMS_BY_NDIM = 1 << 32  # as in csrc/ops.h
_MOST_KNOWN = 16  # shapes of a site whose layouts are kept
_NO_HISTOGRAM, _PER_TENSOR, _PER_CHANNEL, _LINEAR = range(4)
_PYTHON = torch._C.DispatchKey.Python

backward_number = torch._C._current_graph_task_id
address = torch.Tensor.data_ptr
keys_of = torch._C._dispatch_keys


def backward_is_running() -> bool:
    return backward_number() != -1


def has_no_data(x: torch.Tensor) -> bool:
    """Of wrappers without memory of their own: fake and meta tensors, and what functorch makes."""
    return x.is_meta or not torch._C._has_storage(x) or keys_of(x).has(_PYTHON)


def channel_dim_for(channel_dim: int, ndim: int) -> int | None:
    """csrc/ops.h."""
    if channel_dim < DIMS_BY_NDIM:
        return channel_dim
    if ndim > 7:
        return -1
    entry = channel_dim >> 4 * ndim & 15
    return entry - 1 if entry else None


class Rows(NamedTuple):
    """What counts of the tensors that a mask is about: csrc/ops.h."""

    row_index: torch.Tensor
    kept: torch.Tensor
    made: MadeOn | None = None  # None: who launches has seen to it


class Described(NamedTuple):
    """A tensor's layout; ``elements``: of a channel."""

    input: Input
    address: int  # of the input
    elements: int
    by_rows: bool


class Site:
    """A site's state, checked, so that a hook need not."""

    def __init__(
        self,
        devices: Devices,
        moments: torch.Tensor,
        counters: torch.Tensor,
        histogram: torch.Tensor | None,
        active: torch.Tensor | None = None,
        channel_dim: int = 0,
        low: float = 0.0,
        high: float = 0.0,
        block: int = 0,
    ) -> None:
        self.devices = devices
        self.library = devices.library
        self.memory = [each for each in (moments, counters, histogram, active) if each is not None]
        self.device = moments.device
        self.active = active
        self.channel_dim = channel_dim
        self.state = state_of(self.library, moments, counters, histogram, low, high, block)
        devices.check(self.device)
        if active is not None:
            _check_one_int32("active", active, self.device)
        self.channels = int(self.state.channels)
        self.runs_cuda_kernels = self.devices.runs_cuda_kernels(self.device)
        self._known: dict[Any, Described] = {}
        self._state = ctypes.addressof(self.state)
        self._accumulate = self.library.cpu.accumulate
        self._is_active = None
        if self.active is not None and not self.runs_cuda_kernels:
            self._is_active = ctypes.c_int32.from_address(self.active.data_ptr())

    def accumulate(self, x: torch.Tensor, rows: Rows | None = None) -> bool:
        """Folds `x`, or its rows that count, into the state; in a CUDA graph that is captured, too, and on any stream.

        Whether there are rows and they are about this tensor.
        """
        if x.is_neg():
            x = x.resolve_neg()
        found = self.described(x, rows)
        if found.elements == 0:
            return found.by_rows
        data = address(x)
        if not data:
            raise RuntimeError("hookstats: expected a tensor with data, got one without storage")
        if self.runs_cuda_kernels:
            with self.devices.guard(self.device):
                launch = self.devices.launch(self.device, self.active, has_parts=True)
                of_rows = [] if rows is None else [rows.row_index, rows.kept]
                if launch.capture:
                    keep_for_graphs([*self.memory, *of_rows])
                if rows is not None and rows.made is not None:
                    rows.made.used_here(of_rows)
                check(self.library.cuda.accumulate(data, found.address, self._state, byref(launch)))
        elif self._is_active is None or self._is_active.value:
            self._accumulate(data, found.address, self._state)
        return found.by_rows

    def described(self, x: torch.Tensor, rows: Rows | None = None) -> Described:
        """What a kernel is given for `x`, checked, but for its data."""
        if rows is not None:
            return self._described(x, rows)
        key = x.dtype, x.shape, x.stride() if x.layout is torch.strided else None, x.device
        found = self._known.get(key)
        if found is None:
            found = self._described(x, None)
            if len(self._known) >= _MOST_KNOWN:
                self._known = {}
            self._known[key] = found
        return found

    def _described(self, x: torch.Tensor, rows: Rows | None) -> Described:
        if x.layout != torch.strided:
            raise TypeError(f"hookstats: expected a dense strided tensor, got layout {_name(x.layout)}")
        if x.device != self.device:
            raise RuntimeError(
                f"hookstats: expected a tensor on {self.device}, where its state is, got one on {x.device}"
            )
        dtype = dtype_of(self.library, x)
        if rows is not None:
            self._check_rows(rows)
        layout = self._layout_of(x, rows)
        given = Input(None, dtype, layout)
        if self.state.block:
            given.matrix = self._matrix_of(x, rows if layout.row_dims > 0 else None)
        return Described(given, ctypes.addressof(given), layout.count, layout.row_dims > 0)

    def _layout_of(self, x: torch.Tensor, rows: Rows | None) -> Layout:
        ndim = x.dim()
        known = channel_dim_for(self.channel_dim, ndim)
        dim = ndim if known is None else known  # ndim: none
        named = dim + ndim if dim < 0 else dim
        layout, channel = Layout(channels=1, count=1), -1
        if self.channels > 1:
            channel = named
            if not 0 <= channel < ndim:
                raise IndexError(f"hookstats: channel_dim={dim} is out of range for a tensor of shape {list(x.shape)}")
            if x.shape[channel] != self.channels:
                raise ValueError(
                    f"hookstats: expected {self.channels} channels in dimension {dim}, got a tensor of shape "
                    f"{list(x.shape)}"
                )
            layout.channels, layout.channel_stride = self.channels, x.stride(channel)
        dims = [each for d, each in enumerate(zip(x.shape, x.stride(), strict=True)) if d != channel]
        row_dims = 0 if rows is None else _row_dims_of(x, named, rows.row_index)
        if not lay_out(self.library, layout, dims, row_dims):
            raise ValueError(
                f"hookstats: expected at most {self.library.constants['MOST_DIMS']} dimensions that do not merge "
                f"beside the channels, got strides {list(x.stride())} for shape {list(x.shape)}"
            )
        if row_dims > 0 and rows is not None:
            self._look_up(layout, rows)
        return layout

    def _matrix_of(self, x: torch.Tensor, rows: Rows | None) -> Layout:
        """The last dimension as channels: csrc/inputs.cpp."""
        ndim = x.dim()
        row_dims = 0 if rows is None else _row_dims_of(x, -1, rows.row_index)
        others = ndim if row_dims == ndim else ndim - 1
        layout = Layout(channels=1, count=1)
        if others < ndim:
            layout.channels, layout.channel_stride = x.shape[others], x.stride(others)
        dims = list(zip(x.shape[:others], x.stride()[:others], strict=True))
        fits = lay_out(self.library, layout, dims[:row_dims], in_order=True)
        if row_dims > 0:
            if layout.ndim == 0:
                layout.size[0], layout.ndim = 1, 1
            layout.row_dims = layout.ndim
        if not fits or not lay_out(self.library, layout, dims[row_dims:], in_order=True):
            raise ValueError(
                f"hookstats: expected at most {self.library.constants['MOST_DIMS']} dimensions that do not merge, got "
                f"strides {list(x.stride())} for shape {list(x.shape)}"
            )
        if rows is not None:
            self._look_up(layout, rows)
        return layout

    def _look_up(self, layout: Layout, rows: Rows) -> None:
        """The rows of a layout that count."""
        layout.row_index, layout.kept = rows.row_index.data_ptr(), rows.kept.data_ptr()
        if not self.runs_cuda_kernels:
            layout.kept = None
            layout.count = int(rows.kept) * math.prod(list(layout.size)[layout.row_dims : layout.ndim])

    def _check_rows(self, rows: Rows) -> None:
        row_index, kept = rows.row_index, rows.kept
        if row_index.dtype != torch.int32 or not row_index.is_contiguous() or row_index.device != self.device:
            raise RuntimeError(
                f"hookstats: rows: expected contiguous int32 on {self.device}, got {_name(row_index.dtype)} "
                f"{list(row_index.shape)} with strides {list(row_index.stride())} on {row_index.device}"
            )
        _check_one_int32("kept", kept, self.device)
        if not self.runs_cuda_kernels and not 0 <= int(kept) <= row_index.numel():
            raise ValueError(f"hookstats: kept: expected 0 to {row_index.numel()} rows, got {int(kept)}")


def lay_out(
    library: Library, layout: Layout, dims: list[tuple[int, int]], row_dims: int = 0, in_order: bool = False
) -> bool:
    """Puts dimensions, (size, stride), into a layout. False: it has no room for them."""
    numbers = array(c_int64, [number for dim in dims for number in dim])
    return bool(library.cpu.lay_out(byref(layout), numbers, len(dims), row_dims, in_order))


def _row_dims_of(x: torch.Tensor, channel: int, mask: torch.Tensor) -> int:
    """How many of the tensor's first dimensions are rows of the mask; 0: it is not about it."""
    dims = 0
    if x.dim() >= mask.dim() and x.shape[: mask.dim()] == mask.shape:
        dims = mask.dim()
    elif x.dim() > 0 and x.shape[0] == mask.numel():
        dims = 1
    return 0 if 0 <= channel < dims else dims


def dtype_of(library: Library, x: torch.Tensor) -> int:
    """As kernels number it."""
    names = library.constants["DTYPES"]
    name = str(x.dtype).removeprefix("torch.")
    if name not in names:
        raise TypeError(f"hookstats: expected a tensor of one of {' '.join(names)}, got {_name(x.dtype)}")
    return int(names.index(name))


def state_of(
    library: Library,
    moments: torch.Tensor,
    counters: torch.Tensor,
    histogram: torch.Tensor | None,
    low: float,
    high: float,
    block: int = 0,
) -> State:
    """low < high: the histogram is of linear bins. Both NaN: of any bins; it is only to be merged."""
    _check_moments(moments, len(library.constants["FIELDS"]))
    _check_counters(counters, library.constants["COUNTERS"], moments.device)
    state = State(moments.data_ptr(), moments.stride(0), moments.shape[1], counters.data_ptr())
    if histogram is not None:
        _add_histogram(library, state, histogram, moments.device, low, high, block)
    return state


def _check_moments(moments: torch.Tensor, fields: int) -> None:
    if (
        moments.dtype != torch.float64
        or moments.dim() != 2
        or moments.shape[0] != fields
        or moments.shape[1] < 1
        or (moments.shape[1] > 1 and moments.stride(1) != 1)
    ):
        raise RuntimeError(
            f"hookstats: moments: expected float64 [{fields}, channels] with adjacent channels, got "
            f"{_name(moments.dtype)} {list(moments.shape)} with strides {list(moments.stride())}"
        )


def _check_counters(counters: torch.Tensor, expected: int, device: torch.device) -> None:
    if (
        counters.dtype != torch.int64
        or tuple(counters.shape) != (expected,)
        or not counters.is_contiguous()
        or counters.device != device
    ):
        raise RuntimeError(
            f"hookstats: counters: expected int64 [{expected}] on {device}, got {_name(counters.dtype)} "
            f"{list(counters.shape)} on {counters.device}"
        )


def _add_histogram(
    library: Library,
    state: State,
    histogram: torch.Tensor,
    device: torch.device,
    low: float,
    high: float,
    block: int,
) -> None:
    channels = state.channels
    exponents = low == high
    state.by_channel = histogram.dim() == 2
    state.bins = histogram.shape[-1] if histogram.dim() else 0
    state.low, state.high = low, high
    state.kind = _LINEAR if not exponents else _PER_CHANNEL if state.by_channel else _PER_TENSOR
    octaves, bins = library.constants["OCTAVE_BINS"], library.constants["EXPONENT_BINS"]
    if block:
        if abs(block) not in (16, 32) or not exponents or histogram.dim() != 1:
            raise ValueError(
                "hookstats: block: expected 16, 32, -16 or -32 beside exponents per tensor, or 0; got " + str(block)
            )
        state.block = block
        bins += library.constants["BLOCK_BINS"]
    fits = histogram.shape[0] == channels if state.by_channel else histogram.dim() == 1
    wide = state.bins == (octaves if state.by_channel else bins) if exponents else state.bins > 2
    if (
        histogram.dtype != torch.int64
        or not fits
        or not wide
        or not histogram.is_contiguous()
        or histogram.device != device
    ):
        raise RuntimeError(
            f"hookstats: histogram: expected int64 [{bins}] or [{channels}, {octaves}] on {device}, or with low < high "
            f"[bins + 2] or [{channels}, bins + 2]; got {_name(histogram.dtype)} {list(histogram.shape)} on "
            f"{histogram.device} with low={low:g}, high={high:g}"
        )
    state.histogram = histogram.data_ptr()


def _check_one_int32(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.dtype != torch.int32 or x.numel() != 1 or x.device != device:
        raise RuntimeError(
            f"hookstats: {name}: expected one int32 on {device}, got {_name(x.dtype)} {list(x.shape)} on {x.device}"
        )


def _name(thing: torch.dtype | torch.layout) -> str:
    return str(thing).removeprefix("torch.")
