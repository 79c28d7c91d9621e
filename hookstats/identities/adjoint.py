"""The adjoint test of one module in a measured step: whether its backward is that of its forward. On request.

For any v and dy, <dy, J v> = <gradient of <dy, y>, v>. The right side is what the module's backward makes, in
training's precision; the left one is of forwards in float32, at its tensors plus and minus a little of v, and knows
nothing of that backward. All runs are of copies of what the module is given, before it runs, and leave it as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from hookstats import _native
from hookstats.identities.runs import list_tensors
from hookstats.modules import order
from hookstats.modules.channels import ChannelAxis
from hookstats.tools.undo import ModuleState, RandomState, eager, pause_statistics
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.guards import Rows
from hookstats.watch.hooks import FedHook, SiteSpec
from hookstats.watch.wrappers import is_wrapper

KIND = "adjoint"
INPUT = "input"  # all that a module is given and wants a gradient, as one argument
_STEP = 2.0**-10  # of an argument's rms
_LEAST_RMS = 2.0**-5  # of an argument that is 0
_DIRECTIONS = 4
_PARAMETERS = 2  # of a module, in one test
_CURVES = 0.05  # of the size, by which differences ahead and behind do not come together with the step
_SAME = 0.1  # of its norm: the output in float32 and in training's precision
_COPIES = 4  # of all tensors: in float32, and a direction, moved by it, and gradients
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device)


class AdjointTests:
    """Tests modules in turns, each in two measured steps in a row: first one of each class and sizes, then the others.

    A test is of the input and of two parameters, at the next turn of others.

    Attributes:
        left_out: the modules whose latest test told nothing, each with the reason.
    """

    def __init__(self, binder: SiteBinder, modules: Mapping[str, nn.Module]) -> None:
        self._binder = binder
        self._store = binder.store
        alike: dict[Any, list[str]] = {}
        for name, module in modules.items():
            sizes = tuple(each.shape for each in module.parameters())
            alike.setdefault((type(module), sizes), []).append(name)
        self._turns = [name for names in zip_longest(*alike.values()) for name in names if name is not None]
        self._step, self._tested = 0, -1  # measured ones: how many were closed, and in which a module was tested
        self._sites: dict[tuple[str, str], FedHook] = {}
        self.left_out: dict[str, str] = {}

    def close_step(self) -> None:
        """Note that a measured step has ended."""
        self._step += 1

    def register_hooks(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        """Hang a hook on each module. Returns their handles."""
        return [
            order.register(modules[name], _BeforeHook(self, name), on_inputs=True, with_kwargs=True)
            for name in self._turns
        ]

    def run(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Test a module that is about to run with this, if it is its turn. Raises under strict alone."""
        if self._turns[self._step // 2 % len(self._turns)] != name or self._tested == self._step:
            return
        if not torch.is_grad_enabled() or not self._binder.measures_now() or is_capturing():
            return
        if _native.backward_is_running():
            return
        self._tested = self._step
        try:
            with self._binder.span_of_a_hook():
                found = self._test(name, module, (args, kwargs))
                self.left_out.pop(name, None)
                for argument, numbers, counts in found:
                    self._site(name, argument, module, numbers.device).feed(numbers[:, None], counts)
        except _Untestable as problem:
            self.left_out[name] = str(problem)
        except Exception as error:
            if self._store.strict:
                raise
            self.left_out[name] = f"{type(error).__name__}: {str(error)[:100]}"

    def _site(self, name: str, argument: str, module: nn.Module, device: torch.device) -> FedHook:
        if (name, argument) not in self._sites:
            spec = SiteSpec(name, f".{argument}", ChannelAxis(-1, None), False, (KIND, None), module)
            self._sites[name, argument] = self._binder.late_hook(spec, device, FedHook)
        return self._sites[name, argument]

    def _test(self, name: str, module: nn.Module, given: Any) -> Iterable[tuple[str, torch.Tensor, Rows]]:
        copy = _Copy(module, given)
        device, needed = copy.device, _COPIES * copy.bytes
        if not self._store.claim(device, needed):
            raise _Untestable(f"copies of {needed:,} bytes would not fit into what is left of memory_budget")
        try:
            with copy.undone(), torch.no_grad():
                return list(copy.test(self._step, self._step // 2 // len(self._turns)))
        finally:
            self._store.claim(device, -needed)


class _BeforeHook(order.ModuleHook):
    def __init__(self, tests: AdjointTests, name: str) -> None:
        self._tests, self._name = tests, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not torch._C._is_tracing():
            self._tests.run(self._name, module, args, kwargs)


class _Untestable(Exception):
    """The reason why a module is not tested."""


class _Forward(nn.Module):
    """A module's forward without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


class _Backward(NamedTuple):
    """A run in training's precision, with gradients of <dy, y>.

    Attributes:
        outputs: the floating tensors, of which those count that have a gradient, a `dy`.
        gradients: by argument, of each of its tensors by its key.
    """

    outputs: list[torch.Tensor]
    dy: list[torch.Tensor | None]
    gradients: dict[str, dict[Any, torch.Tensor]]


Tensors = dict[Any, torch.Tensor]  # by a parameter's or buffer's name, or by the number of an input


class _Copy:
    """A module and what it is given, to run it again.

    Attributes:
        device: where its tensors lie. bytes: of these in float32.
    """

    def __init__(self, module: nn.Module, given: Any) -> None:
        self._module = module
        leaves, self._spec = tree_flatten(given)
        self._leaves: list[Any] = leaves
        strange = [each for each in leaves if not isinstance(each, (*_PLAIN, torch.Tensor))]
        if strange:
            raise _Untestable(f"it is given a {type(strange[0]).__name__}, which cannot be copied")
        own: Tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        inputs: Tensors = {i: each for i, each in enumerate(leaves) if isinstance(each, torch.Tensor)}
        self._tensors = own | inputs
        if any(is_wrapper(each) or _native.has_no_data(each) for each in self._tensors.values()):
            raise _Untestable("its tensors are no plain ones, such as those of several ranks")
        self._arguments: dict[str, list[Any]] = {
            name: [name]
            for name, each in own.items()
            if each.requires_grad and each.is_floating_point() and not _is_changed_by_design(module, name)
        }
        moved = [i for i, each in inputs.items() if each.requires_grad and each.is_floating_point()]
        self._arguments |= {INPUT: moved} if moved else {}
        if not self._arguments:
            raise _Untestable("nothing that it is given or has wants a gradient that is a derivative")
        devices = {each.device for each in self._tensors.values() if each.dim()}
        if len(devices) != 1:
            raise _Untestable("its tensors lie on several devices")
        self.device = devices.pop()
        self.bytes = sum(4 * each.numel() for each in self._tensors.values() if each.is_floating_point())

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Leave random numbers, attributes and hooks as they are, and what watches saved tensors out of it."""
        state, self._random = ModuleState(self._module), RandomState(self._module, {self.device})
        is_cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # of casts of our copies
        try:
            with pause_statistics(self._module), eager(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
                yield
        finally:
            torch.set_autocast_cache_enabled(is_cached)
            state.put_back()
            self._random.put_back()

    def test(self, seed: int, turn: int) -> Iterator[tuple[str, torch.Tensor, Rows]]:
        """Yield each argument, by how much its gradient is off in some directions, of its size, and which count."""
        names = [name for name in self._arguments if name != INPUT]
        first = _PARAMETERS * turn
        chosen = {INPUT, *(names[(first + i) % len(names)] for i in range(_PARAMETERS) if names)}
        self._arguments = {name: keys for name, keys in self._arguments.items() if name in chosen}
        generator = torch.Generator(self.device).manual_seed(seed)
        backward = self._differentiate(generator)
        wide = {key: _widen(each) for key, each in self._tensors.items()}
        with torch.autocast(self.device.type, enabled=False):
            here = self._run_again(wide)
            is_same = _are_close(here, backward)
            for argument, keys in self._arguments.items():
                gradients = backward.gradients[argument]
                scales = {key: _rms(wide[key]) for key in keys}
                size = torch.stack([scales[key] * gradients[key].norm() for key in keys]).norm()
                found = [self._compare(wide, here, backward, argument, scales, generator) for _ in range(_DIRECTIONS)]
                by_gradient, by_forward, bend = (torch.stack(each) for each in zip(*found, strict=True))
                size = torch.maximum(size, by_forward.square().mean().sqrt())
                off = (by_gradient - by_forward).abs() / size
                counts = (bend.abs() <= _CURVES * size).all() & is_same & (size > 0)
                kept = counts.to(torch.int32).reshape(1) * _DIRECTIONS
                places = torch.arange(_DIRECTIONS, dtype=torch.int32, device=self.device)
                yield argument, off.float().nan_to_num(), (places, kept)

    def _compare(
        self,
        wide: Tensors,
        here: list[torch.Tensor],
        backward: _Backward,
        argument: str,
        scales: Tensors,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the derivative of <dy, y> in a random direction, by gradients and by forwards, and what is no curve.

        Where the forward is smooth, differences ahead and behind differ by the step times a number. At a tie of a
        maximum they differ by as much for any step, and at a jump by more for a smaller one.
        """
        moves = {}
        for key, scale in scales.items():
            signs = torch.randint(0, 2, wide[key].shape, generator=generator, device=self.device)
            moves[key] = scale * (2 * signs - 1).to(wide[key].dtype)
        gradients = backward.gradients[argument]
        by_gradient = torch.stack([(gradients[key] * moves[key]).sum(dtype=torch.float64) for key in moves]).sum()

        def difference(step: float) -> torch.Tensor:
            moved = self._run_again(wide | {key: wide[key] + step * move for key, move in moves.items()})
            pairs = zip(moved, here, backward.dy, strict=True)
            parts = [(dy * (a - b)).sum(dtype=torch.float64) for a, b, dy in pairs if dy is not None]
            return torch.stack(parts).sum() / step

        ahead, behind, ahead_half, behind_half = map(difference, (_STEP, -_STEP, _STEP / 2, -_STEP / 2))
        return by_gradient, (ahead + behind) / 2, 2 * (ahead_half - behind_half) - (ahead - behind)

    def _differentiate(self, generator: torch.Generator) -> _Backward:
        moved = {key for keys in self._arguments.values() for key in keys}
        with torch.enable_grad():
            tensors = {key: each.detach().clone().requires_grad_(key in moved) for key, each in self._tensors.items()}
            outputs = self._run_again({key: each.clone() for key, each in tensors.items()})
            dy = [_draw_gradient(y, generator) if y.requires_grad else None for y in outputs]
            known = [(y, each) for y, each in zip(outputs, dy, strict=True) if each is not None]
            if not known:
                raise _Untestable("its output has no gradient")
            keys = list(moved)
            found = torch.autograd.grad(
                [y for y, _ in known], [tensors[key] for key in keys], [each for _, each in known], allow_unused=True
            )
        gradients = {
            key: _widen(torch.zeros_like(tensors[key]) if each is None else each)
            for key, each in zip(keys, found, strict=True)
        }
        by_argument = {name: {key: gradients[key] for key in own} for name, own in self._arguments.items()}
        wide = [None if each is None else _widen(each) for each in dy]
        return _Backward([each.detach() for each in outputs], wide, by_argument)

    def _run_again(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return the floating outputs of a run with other tensors, with the random numbers of the first run."""
        leaves = [tensors.get(i, each) for i, each in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self._spec)
        own = {f"module.{key}": each for key, each in tensors.items() if isinstance(key, str)}
        self._random.put_back()
        return list_tensors(functional_call(_Forward(self._module), own, args, kwargs))


def _is_changed_by_design(module: nn.Module, parameter: str) -> bool:
    """Return whether it is a table of which a row gets no gradient, or frequent rows less."""
    owner = module.get_submodule(parameter.rpartition(".")[0])
    return getattr(owner, "padding_idx", None) is not None or bool(getattr(owner, "scale_grad_by_freq", False))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in float32, or what is no floating tensor, or a float64 one."""
    is_narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.detach().to(torch.float32 if is_narrow else tensor.dtype, copy=True)


def _draw_gradient(y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers with parts along the output and along ones: what norms and softmaxes project out."""
    with torch.no_grad():
        noise = torch.randn(y.shape, generator=generator, device=y.device)
        return (noise + y.detach() / _rms(y.detach().float()) + 1).to(y.dtype)


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    rms: torch.Tensor = tensor.square().mean().sqrt()
    return torch.where(rms > 0, rms, _LEAST_RMS)


def _are_close(wide: list[torch.Tensor], backward: _Backward) -> torch.Tensor:
    """Return whether the outputs in float32 are those in training's precision, but for rounding."""
    pairs = [(a, b) for a, b, dy in zip(wide, backward.outputs, backward.dy, strict=True) if dy is not None]
    return torch.stack([(a - b).norm() <= _SAME * a.norm() for a, b in pairs]).all()
