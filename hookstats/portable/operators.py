"""The operators of csrc, registered from Python; and what takes many tensors at once, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64, c_void_p
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.dlpack import from_dlpack

from hookstats.portable.devices import Devices, MadeOn, keep_for_graphs
from hookstats.portable.library import Layout, Sampled, SoftmaxRows, State, Words, array
from hookstats.portable.sites import (
    Rows,
    Site,
    address,
    backward_is_running,
    dtype_of,
    has_no_data,
    lay_out,
    state_of,
)


class Operators:
    """Those of one library's kernels, in a namespace of torch's operators."""

    def __init__(self, devices: Devices, namespace: str) -> None:
        self._devices = devices
        self._library = devices.library
        self._registered = torch.library.Library(namespace, "FRAGMENT")
        self._add(
            "accumulate(Tensor x, Tensor(a!) moments, Tensor(b!) counters, Tensor(c!)? histogram, Tensor? active, "
            "int channel_dim, bool skip_recomputation=False, float low=0.0, float high=0.0, Tensor? rows=None, "
            "Tensor? kept=None, int block=0) -> ()",
            self._accumulate,
        )
        self._add(
            "merge(Tensor(a!) moments, Tensor(b!) counters, Tensor(c!)? histogram, Tensor from_moments, "
            "Tensor from_counters, Tensor? from_histogram) -> ()",
            self._merge,
        )
        self._add("checksums(Tensor[] tensors) -> Tensor", self._checksums, None)
        self._add("softmax_rows(Tensor logits, int top_k=0) -> Tensor", self._softmax_rows, self._empty_for)
        self._add(
            "sample(Tensor[] tensors, Tensor(a!)[] values, Tensor? active, Tensor(b!)[] differences) -> ()",
            self._sample,
            None,
        )
        self._registered.define("add(Tensor(a!) counter, Tensor amount, bool skip_recomputation) -> ()")
        self._registered.impl("add", _add, "CompositeExplicitAutograd")
        self._registered.impl("add", torch.library.fallthrough_kernel, "Autograd")

    def _add(
        self, schema: str, run: Callable[..., Any], shapes: Callable[..., Any] | None = lambda *a, **k: None
    ) -> None:
        self._registered.define(schema)
        name = schema.split("(")[0]  # with its overload
        for key in ("CPU", "CUDA"):
            self._registered.impl(name, run, key)
        if shapes is not None:
            self._registered.impl(name, shapes, "Meta")
        self._registered.impl(name, torch.library.fallthrough_kernel, "Autograd")

    def _accumulate(
        self,
        x: torch.Tensor,
        moments: torch.Tensor,
        counters: torch.Tensor,
        histogram: torch.Tensor | None,
        active: torch.Tensor | None,
        channel_dim: int,
        skip_recomputation: bool = False,
        low: float = 0.0,
        high: float = 0.0,
        rows: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        block: int = 0,
    ) -> None:
        if skip_recomputation and backward_is_running():
            return
        if (rows is None) != (kept is None):
            raise RuntimeError(
                "hookstats: expected both rows and kept or neither, got only " + ("kept" if rows is None else "rows")
            )
        site = Site(self._devices, moments, counters, histogram, active, channel_dim, low, high, block)
        site.accumulate(x, None if rows is None or kept is None else Rows(rows, kept))

    def _merge(
        self,
        moments: torch.Tensor,
        counters: torch.Tensor,
        histogram: torch.Tensor | None,
        from_moments: torch.Tensor,
        from_counters: torch.Tensor,
        from_histogram: torch.Tensor | None,
    ) -> None:
        into = state_of(self._library, moments, counters, histogram, math.nan, math.nan)
        other = state_of(self._library, from_moments, from_counters, from_histogram, math.nan, math.nan)
        if into.channels not in (other.channels, 1):
            raise ValueError(
                f"hookstats: expected {into.channels} channels to merge, or one channel to merge into; got "
                f"{other.channels}"
            )
        if (into.kind, into.bins, into.by_channel) != (other.kind, other.bins, other.by_channel):
            raise ValueError(
                f"hookstats: expected states with the same kind of histogram to merge, got {into.bins} and "
                f"{other.bins} bins, by channel: {into.by_channel} and {other.by_channel}"
            )
        device = moments.device
        if device != from_moments.device:
            raise RuntimeError(
                f"hookstats: expected states on one device to merge, got {device} and {from_moments.device}"
            )
        self._devices.check(device)
        if self._devices.runs_cuda_kernels(device):
            if self._devices.capture_on(device):
                keep_for_graphs([moments, counters, histogram, from_moments, from_counters, from_histogram])
            self._devices.run(device, "merge", byref(into), byref(other))
        else:
            self._library.cpu.merge(byref(into), byref(other))

    def _checksums(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of each tensor, int64 [tensors] on their device: csrc/checksum.h."""
        device = tensors[0].device
        held: list[torch.Tensor] = []
        words: list[Words] = []
        for each in tensors:
            if each.device != device:
                raise ValueError(
                    f"hookstats: checksums: expected tensors on one device, got {device} and {each.device}"
                )
            if each.numel() > 0 and not address(each):
                raise ValueError("hookstats: checksums: expected tensors with data, got one whose storage is empty")
            plain = each.resolve_conj().resolve_neg()
            found = self._words_of(plain)
            if found is None:  # more dimensions than a layout has that do not merge
                plain = plain.contiguous()
                found = self._words_of(plain)
            assert found is not None
            held.append(plain)
            words.append(found)
        out = torch.zeros(len(words), dtype=torch.int64, device=device)
        all_words = array(Words, words)
        if not self._devices.runs_cuda_kernels(device):
            self._library.cpu.checksums(all_words, len(words), out.data_ptr())
            return out
        table, numbers = self._devices.planned("plan_checksums", all_words, device, 1)
        if numbers[0] > 0:
            self._devices.run(device, "checksums", len(words), numbers[0], table.data_ptr(), out.data_ptr())
        return out

    def _words_of(self, x: torch.Tensor) -> Words | None:
        size = x.element_size()
        parts = size // 8 if size > 8 else 1  # of an element: a complex128 is two words
        dims = [(count, stride * parts) for count, stride in zip(x.shape, x.stride(), strict=True)]
        layout = Layout(channels=1, count=1)
        if not lay_out(self._library, layout, [*dims, (parts, 1)], in_order=True):
            return None
        return Words(address(x), layout, size // parts)

    def _empty_for(self, logits: torch.Tensor, top_k: int = 0) -> torch.Tensor:
        """[numbers, ...], each as large as the logits without their last dimension."""
        most = self._library.constants["MOST_KEPT"]
        if logits.dim() == 0:
            raise ValueError("hookstats: softmax_rows: expected logits [..., n], got a tensor of no dimensions")
        if not 0 <= top_k < most or (top_k > 0 and top_k >= logits.shape[-1]):
            raise ValueError(
                f"hookstats: softmax_rows: expected top_k from 1 to {most - 1} and less than the number of logits of a "
                f"row, {logits.shape[-1]}; got {top_k}"
            )
        numbers = self._library.constants["SOFTMAX_FIELDS"] + (top_k > 0)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return torch.empty((numbers, *logits.shape[:-1]), dtype=dtype, device=logits.device)

    def _softmax_rows(self, given: torch.Tensor, top_k: int = 0) -> torch.Tensor:
        out, logits = self._empty_for(given, top_k), given.resolve_neg()
        dtype = dtype_of(self._library, logits)
        rows = self._rows_of(logits, top_k)
        if rows is None:
            logits = logits.contiguous()
            rows = self._rows_of(logits, top_k)
        assert rows is not None
        if rows.at.count == 0:
            return out
        if rows.n > 0 and not rows.data:
            raise ValueError("hookstats: softmax_rows: expected logits with data")
        if self._devices.runs_cuda_kernels(logits.device):
            self._devices.run(logits.device, "softmax_rows", byref(rows), dtype, out.data_ptr())
        else:
            self._library.cpu.softmax_rows(byref(rows), dtype, out.data_ptr())
        return out

    def _rows_of(self, logits: torch.Tensor, top_k: int) -> SoftmaxRows | None:
        layout, n = Layout(channels=1, count=1), logits.shape[-1]
        dims = list(zip(logits.shape, logits.stride(), strict=True))[:-1]
        if not lay_out(self._library, layout, dims, in_order=True):
            return None
        return SoftmaxRows(address(logits), layout, n, logits.stride(-1) if n > 1 else 1, top_k)

    def _sample(
        self,
        tensors: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        active: torch.Tensor | None,
        differences: Sequence[torch.Tensor],
    ) -> None:
        if len(values) != len(tensors) or len(differences) not in (0, len(tensors)):
            raise ValueError(
                f"hookstats: sample: expected lists of one length, got {len(tensors)}, {len(values)}, "
                f"{len(differences)}"
            )
        if not tensors:
            return
        device = tensors[0].device
        found: list[Sampled] = []
        for i, each in enumerate(tensors):
            if each.device != device:
                raise ValueError(f"hookstats: sample: expected tensors on one device, got {device} and {each.device}")
            if each.numel() > 0:
                found.append(self._sampled(each, values[i], differences[i] if differences else None))
        if self._devices.runs_cuda_kernels(device):
            if self._devices.capture_on(device):
                keep_for_graphs([*values, *differences, active])
            self._devices.run(device, "sample", array(Sampled, found), len(found), active=active)
        elif active is None or int(active) != 0:
            self._library.cpu.sample(array(Sampled, found), len(found))

    def _sampled(self, x: torch.Tensor, values: torch.Tensor, differences: torch.Tensor | None) -> Sampled:
        if x.layout != torch.strided or has_no_data(x):
            raise TypeError(
                "hookstats: sample: expected a plain tensor with data, got a wrapper, a mere shape or layout "
                f"{x.layout}"
            )
        if not _is_dense(x) or x.is_neg():
            raise ValueError(
                "hookstats: sample: expected a tensor whose elements lie side by side, got strides "
                f"{list(x.stride())} for shape {list(x.shape)}"
            )
        wanted = min(x.numel(), self._library.constants["SAMPLE_SIZE"])
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        for name, buffer in (("values", values), ("differences", differences)):
            if buffer is not None and not (
                buffer.dtype == dtype
                and buffer.device == x.device
                and buffer.is_contiguous()
                and buffer.numel() == wanted
            ):
                raise ValueError(
                    f"hookstats: sample: {name}: expected contiguous {dtype} [{wanted}] on {x.device}, got "
                    f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}"
                )
        into = None if differences is None else differences.data_ptr()
        return Sampled(address(x), values.data_ptr(), into, x.numel(), dtype_of(self._library, x))


def _is_dense(x: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in any order."""
    wanted = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != wanted:
                return False
            wanted *= size
    return True


def _add(counter: torch.Tensor, amount: torch.Tensor, skip_recomputation: bool) -> None:
    """Asks when a graph runs, not when it is traced. The counter's version stays."""
    if skip_recomputation and backward_is_running():
        return
    with torch._C._AutoDispatchBelowAutograd(), _unsafe_preserve_version_counter(counter):
        counter.add_(amount)


class Batch:
    """The sites whose tensors come together; here one is folded after the other."""

    def __init__(
        self,
        devices: Devices,
        moments: list[torch.Tensor],
        counters: list[torch.Tensor],
        histograms: list[torch.Tensor | None],
        active: list[torch.Tensor],
        channel_dims: list[int],
        low: float,
        high: float,
        block: int,
    ) -> None:
        lists = (moments, counters, histograms, active, channel_dims)
        if len({len(each) for each in lists}) != 1:
            got = ", ".join(str(len(each)) for each in lists)
            raise ValueError(f"hookstats: Batch: expected lists of one length, got {got}")
        self._sites = [Site(devices, *each, low, high, block) for each in zip(*lists, strict=True)]
        self._met: list[Any] = [None] * len(self._sites)

    def accumulate(self, tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, str]]:
        """Folds each tensor into its site's state. What could not be folded, by number, and why."""
        if len(tensors) != len(self._sites):
            raise ValueError(f"hookstats: Batch: expected {len(self._sites)} tensors, got {len(tensors)}")
        failures: list[tuple[int, str]] = []
        for i, (site, x) in enumerate(zip(self._sites, tensors, strict=True)):
            if x is None or x.numel() == 0:
                continue
            try:
                if x.layout == torch.strided and has_no_data(x):
                    site.described(x)  # its dtype or its shape may be what is wrong
                    raise TypeError("hookstats: expected a plain tensor with data, got a wrapper or a mere shape")
                site.accumulate(x)
            except Exception as error:
                failures.append((i, str(error)))
        return failures


class Totals:
    """The totals of sites on one device."""

    def __init__(self, devices: Devices, moments: list[torch.Tensor], counters: list[torch.Tensor]) -> None:
        if not moments or len(counters) != len(moments):
            raise ValueError(
                f"hookstats: Totals: expected two lists of one length from 1, got {len(moments)} and {len(counters)}"
            )
        device = moments[0].device
        for each in moments:
            if each.device != device:
                raise ValueError(f"hookstats: Totals: expected states on one device, got {device} and {each.device}")
        self._devices = devices
        self._memory = [*moments, *counters]
        sites = [Site(devices, *each, None) for each in zip(moments, counters, strict=True)]
        self._states = array(State, [site.state for site in sites])
        constants = devices.library.constants
        self._shape = len(sites), len(constants["FIELDS"]) + constants["COUNTERS"]
        self._device = device
        if devices.runs_cuda_kernels(device):
            self._made = MadeOn(devices, device)
            self._table, (self._blocks, self._scratch) = devices.planned("plan_totals", self._states, device, 2)
            self._made.written()

    def take(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """Of each site in a row: fields, as the bits of float64, then counters. Then the blocks of memory are zero."""
        out = torch.empty(self._shape, dtype=torch.int64, device=self._device)
        if self._devices.runs_cuda_kernels(self._device):
            self._made.used_here([self._table])
            scratch = torch.zeros(self._scratch, dtype=torch.int64, device=self._device)
            numbers = self._shape[0], self._blocks
            memory = self._table.data_ptr(), scratch.data_ptr(), out.data_ptr()
            with self._devices.closing(self._device):
                self._devices.run(self._device, "totals", *numbers, *memory)
                _make_zero(self._devices, blocks)
        else:
            take(self._devices, self._states, out, blocks, None, True)
        return out


def take(
    devices: Devices,
    states: Any,
    totals: torch.Tensor | None,
    blocks: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor] | None,
    clear: bool,
) -> None:
    """On the CPU, between two kernels: totals of states, then copies of blocks, then zeros."""
    here = [block.data_ptr() for block in blocks]
    there = None if copies is None else array(c_void_p, [copy.data_ptr() for copy in copies])
    sizes = array(c_int64, [block.nbytes for block in blocks])
    out = None if totals is None else totals.data_ptr()
    count = 0 if states is None else len(states)
    devices.library.cpu.take(states, count, out, len(here), array(c_void_p, here), there, sizes, clear)


def _make_zero(devices: Devices, blocks: Sequence[torch.Tensor]) -> None:
    """Between two kernels: inside `Devices.closing`. Those of tests that imitate a GPU lie on the CPU."""
    if blocks and blocks[0].is_cpu:
        return take(devices, None, None, blocks, None, True)
    for block in blocks:
        block.zero_()


def clear(devices: Devices, blocks: Sequence[torch.Tensor]) -> None:
    """Makes blocks of state, all on one device, zero between two kernels."""
    if blocks:
        with devices.closing(blocks[0].device):
            _make_zero(devices, blocks)


def set_flags(devices: Devices, flags: Sequence[torch.Tensor], value: int) -> None:
    """Launches so far find what they were, on any stream, and later ones this. Versions stay."""
    for flag in flags:
        with devices.closing(flag.device), _unsafe_preserve_version_counter(flag):
            flag.fill_(value)


class Copies:
    """Copies of the blocks of a store."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def take(self, blocks: Sequence[torch.Tensor], clear: bool) -> list[torch.Tensor]:
        """As they are between two kernels; then (clear) the blocks are zero."""
        for block in blocks:
            if block.dtype != torch.int64 or not block.is_contiguous():
                raise TypeError(
                    f"take: expected contiguous int64, got {block.dtype} with strides {list(block.stride())}"
                )
        if not blocks:
            return []
        copies = [torch.empty_like(block) for block in blocks]
        with self._devices.closing(blocks[0].device):
            if blocks[0].is_cpu:
                take(self._devices, None, None, blocks, copies, clear)
                return copies
            for block, copy in zip(blocks, copies, strict=True):
                copy.copy_(block, non_blocking=True)
            if clear:
                _make_zero(self._devices, blocks)
        return copies

    def give_up_spares(self) -> None:
        """There are none here."""


def part(memory: torch.Tensor, offset: int, shape: Sequence[int], is_float64: bool) -> torch.Tensor:
    """Words of an int64 tensor as a tensor of its own over the same memory, by DLPack, so that it is no view."""
    if memory.dtype != torch.int64 or not memory.is_contiguous():
        raise TypeError(f"part: expected contiguous int64, got {memory.dtype} with strides {list(memory.stride())}")
    size = math.prod(shape)
    if offset < 0 or offset + size > memory.numel():
        raise IndexError(f"part: expected words {offset} to {offset + size} in a memory of {memory.numel()}")
    words = memory.detach()[offset : offset + size]
    if is_float64:
        words = words.view(torch.float64)
    made: torch.Tensor = from_dlpack(words.view(*shape))
    return made
