"""The parameters of a model and their gradients: read in one launch for each dtype when an optimizer steps.

Then gradients are whole: accumulated over microbatches, reduced over ranks, clipped, and not yet zeroed; and buffers
are as forward has left them, before an optimizer's own hooks change them. What an optimizer unscales itself (a fused
one, with a GradScaler) is unscaled here, too; what a closure computes is read behind its first call; of an optimizer
inside another one, the outer counts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hookstats.modules.channels import find_parameter_channels
from hookstats.modules.selection import Slot
from hookstats.modules.sharding import find_sharding, is_dtensor
from hookstats.numbers.fields import Site
from hookstats.numbers.frame import BEFORE_CLIPPING, OCCASIONS, OF_OPTIMIZER
from hookstats.numbers.kinds import kind_of
from hookstats.watch.batches import Batches, ByIdentity, Owner, Parameter, Stepping, find_part, find_place, in_pieces
from hookstats.watch.binding import SiteBinder
from hookstats.watch.flags import is_capturing
from hookstats.watch.given_loss import GivenLoss
from hookstats.watch.local_gradients import LOCAL_GRADIENT, LocalGradients
from hookstats.watch.local_gradients import SAMPLES as OF_REDUCTION
from hookstats.watch.memory import Entry, StateStore, local_part
from hookstats.watch.optimizer_law import KIND as LAW
from hookstats.watch.optimizer_law import OptimizerLaw
from hookstats.watch.planning import BUFFER, kinds_of
from hookstats.watch.samples import KINDS as SAMPLES
from hookstats.watch.samples import Sample, Samples, values_of
from hookstats.watch.states import KIND as STATES
from hookstats.watch.states import States
from hookstats.watch.step_law import KIND as OUTSIDE
from hookstats.watch.step_law import BetweenSteps

_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_OF_CHANGES = ("update_sample", OUTSIDE, LAW)  # samples that are compared when an optimizer has stepped
_OF_VALUES = frozenset(SAMPLES) - {OUTSIDE, LAW}  # samples that parameters have which no optimizer steps
_UNSCALED_BYTES = 64 << 20  # of gradients without their scale, at a time


class Parameters:
    """Measures parameters and gradients, those of an optimizer when it steps, all others when the step ends."""

    def __init__(
        self,
        model: nn.Module,
        store: StateStore,
        kinds: tuple[str, ...],
        binder: SiteBinder,
        default: torch.device,
    ) -> None:
        """default: the device of what lies on none."""
        self._model = weakref.ref(model)
        self._store = store
        self._kinds = kinds
        self._binder = binder
        self._device = default
        self._parameters = ByIdentity()
        self._buffers: list[Parameter] = []
        self._frozen: list[Parameter] = []  # when they were last looked at
        self._batches = Batches(store, binder)
        self._samples = Samples(store, binder)
        self._stepping = Stepping()
        self._states = States(store, binder, default) if STATES in kinds else None
        self._between = BetweenSteps() if OUTSIDE in kinds else None
        self._law = OptimizerLaw(store.flags.on) if LAW in kinds else None
        self.given_loss = GivenLoss(model)
        # What an optimizer makes comes after its step, and what a backward makes comes with it.
        self._standing = {kind for kind in kinds if not kind_of(kind).is_update and not kind_of(kind).is_local}
        self._has_samples = not set(kinds).isdisjoint(SAMPLES)
        self._unstepped: dict[Parameter, Sample] = {}  # while a step is closed
        self._readings = 0  # of the open step; counted on from a multiple of OF_OPTIMIZER
        self._is_ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        timed = weakref.WeakMethod(self._measure_timed)
        self.local_gradients = LocalGradients(model, store, binder, self._batches, timed)
        self.identities: Any = None  # hookstats.identities.measuring.JointSums
        self.adjoint: Any = None  # hookstats.identities.adjoint.AdjointTests

    @property
    def left_out_of_laws(self) -> Mapping[str, Mapping[str, int]]:
        """Return, by the reason, how many parameters, identities, modules and losses laws leave out."""
        return {
            "optimizer": {} if self._law is None else self._law.left_out,
            "identity": {} if self.identities is None else Counter(self.identities.left_out.values()),
            "adjoint": {} if self.adjoint is None else Counter(self.adjoint.left_out.values()),
            "cross_entropy": {self.given_loss.problem: 1} if self.given_loss.problem else {},
        }

    def scalars(self, loss: Any) -> dict[str, Any]:
        """Return the settings of groups of optimizers, where their law is measured, and the logits of a given loss."""
        if not self._store.flags.value:
            return {}
        return self.given_loss.scalars(loss) | ({} if self._law is None else self._law.scalars)

    def add(self, name: str, slot: Slot, keep_channels: bool, group_size: int | None) -> None:
        """Watches a parameter."""
        tensor = slot.get()
        assert tensor is not None
        is_read = slot.is_buffer and BUFFER in self._kinds
        if is_read and not tensor.is_floating_point() and tensor.dtype not in _COUNTS:
            problem = f"expected a floating buffer, or one of {', '.join(map(str, _COUNTS))}; got {tensor.dtype}"
            return self._binder.skipping.give_up([Site(name, BUFFER)], problem)
        if getattr(tensor, "main_param_sharded", False):  # see Parameter.get: parts of no shape
            keep_channels = False
        parameter = Parameter(len(self._parameters.all), name, slot, keep_channels, group_size)
        self._parameters.all.append(parameter)
        if slot.is_buffer:
            self._buffers.append(parameter)
        elif not tensor.requires_grad:
            self._frozen.append(parameter)
        self._add_sites(parameter, slot, tensor)

    def _add_sites(self, parameter: Parameter, slot: Slot, tensor: torch.Tensor) -> None:
        """Make the sites that it has as it is now, and had not before: of one that was frozen, those of gradients."""
        device, width, dim = find_place(slot, tensor, parameter.keeps_channels, self._device)
        has_channels = parameter.keeps_channels and (find_parameter_channels(slot, tensor).width or 1) > 1
        for kind in kinds_of(slot, tensor, self._kinds):
            if kind in parameter.entries:
                continue
            # This process's part of a DTensor may be one channel of several. Of a sample, none is a channel's.
            has_bins, site = not kind_of(kind).is_sample, Site(parameter.name, kind)
            widths = (width, 1) if has_bins else (1,)
            channels = next((each for each in widths if self._store.make_room(device, each, 1, has_bins)), None)
            if channels is None:
                self._binder.skipping.give_up([site], self._store.explain_no_room(1, 1, has_bins))
                continue
            keeps = has_bins and has_channels and channels == width
            entry = self._store.add(site, device, channels, dim, keeps, has_bins)
            entry.channel_dim, entry.group_size = dim, parameter.group_size
            entry.sharding = find_sharding(tensor, dim) if is_dtensor(tensor) else None
            parameter.entries[kind] = entry
        is_there = not nn.parameter.is_lazy(tensor) and not tensor.is_meta
        if "param_update" in parameter.entries and is_there:
            self._may_copy(parameter, local_part(tensor))
        if is_there and not parameter.entries.keys().isdisjoint(SAMPLES):
            self._samples.make_room(parameter, values_of(parameter, local_part(tensor)))
        has_samples = OF_REDUCTION in self._kinds and tensor.requires_grad and not slot.is_buffer
        if has_samples or LOCAL_GRADIENT in parameter.entries:
            self.local_gradients.watch(parameter, has_samples)

    def _add_unfrozen(self) -> None:
        """Watch the gradients of parameters that were frozen and are not any more."""
        for each in list(self._frozen):
            slot = each.slot()
            tensor = None if slot is None else slot.get()
            if slot is not None and tensor is not None and tensor.requires_grad:
                self._frozen.remove(each)
                self._add_sites(each, slot, tensor)

    def _may_copy(self, each: Parameter, local: torch.Tensor) -> bool:
        """Return whether a copy stays inside the budget, once and for all of this size; else the update is skipped."""
        if local.nbytes <= each.copy_bytes:
            return True
        if self._store.claim(local.device, local.nbytes - each.copy_bytes):
            each.copy_bytes = local.nbytes
            return True
        problem = (
            f"a copy of it would not fit into what is left of memory_budget={self._store.memory_budget} bytes, it is "
            f"of {local.nbytes}: raise it, or choose fewer modules="
        )
        self._binder.give_up([each.entries["param_update"]], problem)
        return False

    def before_optimizer_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure the watched parameters of an optimizer; called for every one of the process.

        Returns None, or other (args, kwargs) for its step.
        """
        self._carefully(self._count_step, optimizer)
        if self._between is not None and self._between.is_waiting:
            self._measure_timed(lambda between: between.sample_again(self._find_stepped(optimizer)), self._between)
        if not self._store.flags.is_open():
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._measure_identities(optimizer)
        stepping = self._carefully(self._read_with, optimizer)
        if not stepping or not self._stepping.begin(optimizer):
            return None
        if "param_update" in self._kinds:
            self._measure_timed(self._copy, stepping)
        if self._has_samples:
            self._stepping.sampled = self._measure_timed(self._sample, stepping) or []
        if not callable(closure):
            self.measure(stepping, getattr(optimizer, "grad_scale", None))
            if self._law is not None and self._store.flags.value:
                self._measure_timed(self._law.before, optimizer, stepping)
            return None
        first = True

        def measure_closure() -> Any:
            nonlocal first
            loss = closure()
            if first:
                first = False
                self._measure_identities(optimizer)
                self.measure(stepping)
            return loss

        if len(args) > 1:
            return (args[0], measure_closure, *args[2:]), kwargs
        return args, kwargs | {"closure": measure_closure}

    def _measure_identities(self, optimizer: Optimizer | None) -> None:
        if self.identities is not None:
            self.identities.measure(optimizer)

    def _count_step(self, optimizer: Optimizer) -> None:
        """Also of steps that are not measured: ranks that are at different steps are told apart by it."""
        if optimizer not in self._is_ours:
            self._is_ours[optimizer] = bool(self._find_stepped(optimizer)) or self._is_of_model(optimizer)
        if self._is_ours[optimizer]:
            self._readings += OF_OPTIMIZER - self._readings % OF_OPTIMIZER

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Measures by how much the step has changed them, and what the optimizer keeps of them."""
        if self._stepping.ends(optimizer) and (self._stepping.copies or self._stepping.sampled):
            self._measure_timed(self._measure_updates)
        if self._states is not None and self._store.flags.is_open():
            self._measure_timed(self._measure_states, self._states, optimizer)

    def _measure_states(self, states: States, optimizer: Optimizer) -> None:
        found = [pair for each in self._find_stepped(optimizer) for pair in states.of(each, optimizer)]
        owners, values = [owner for owner, _ in found], [value for _, value in found]
        self._note(owners, list(values), by_optimizer=True)
        self._batches.accumulate(owners, list(values))

    def _find_stepped(self, optimizer: Optimizer) -> list[Parameter]:
        return self._parameters.find(parameter for group in optimizer.param_groups for parameter in group["params"])

    def _read_with(self, optimizer: Optimizer) -> list[Parameter]:
        """Return what is read when it steps: its watched parameters, and buffers that were not read in this step."""
        stepping = self._find_stepped(optimizer)
        waiting = [each for each in self._buffers if not each.measured]
        return stepping + waiting if waiting and (stepping or self._is_of_model(optimizer)) else stepping

    def _is_of_model(self, optimizer: Optimizer) -> bool:
        """Return whether it steps a parameter of the model, a watched one or not."""
        model = self._model()
        stepping = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return model is not None and any(
            id(getattr(parameter, "main_param", parameter)) in stepping for parameter in model.parameters()
        )

    def measure(self, stepping: list[Parameter] | None = None, grad_scale: torch.Tensor | None = None) -> None:
        """Measures the watched ones among those that step; None: all that were not measured in this step."""
        if self._store.flags.value if stepping is None else self._store.flags.is_open():
            run = self._carefully if stepping is None else self._measure_timed  # the end of a step is timed as a whole
            run(self._measure, stepping, grad_scale)

    def _measure(self, stepping: list[Parameter] | None, grad_scale: torch.Tensor | None) -> None:
        by_optimizer = stepping is not None
        samples = self._samples.taken if by_optimizer else self._unstepped
        owners = [
            (each, kind)
            for each in (self._parameters.all if stepping is None else stepping)
            for kind, entry in each.entries.items()
            if kind in self._standing and not entry.given_up
        ]

        def value(each: Parameter, kind: str) -> torch.Tensor | None:
            tensor = each.get() if self._is_wanted(each, kind, by_optimizer) else None
            if tensor is None or nn.parameter.is_lazy(tensor):
                return None
            if kind_of(kind).is_sample:
                sample = samples.get(each)
                return None if sample is None else sample.values
            if kind == BUFFER:
                tensor = tensor.detach().double() if tensor.dtype in _COUNTS else tensor.detach()  # counts are exact
            return find_part(self._binder, each, kind, tensor.grad if kind == "param_grad" else tensor)

        values = self._read(owners, value)
        self._note(owners, values, by_optimizer)
        scaled: dict[Owner, torch.Tensor] = {}
        if grad_scale is not None:
            for place, (owner, gradient) in enumerate(zip(owners, values, strict=True)):
                if owner[1] == "param_grad" and gradient is not None:
                    scaled[owner], values[place] = gradient, None
        self._batches.accumulate(owners, values)
        self.local_gradients.sample_reduced(self._parameters.all if stepping is None else stepping, grad_scale)
        if grad_scale is not None:
            self._measure_unscaled(scaled, grad_scale)

    def _measure_unscaled(self, scaled: dict[Owner, torch.Tensor], scale: torch.Tensor) -> None:
        """Measure gradients that a fused optimizer unscales itself, a few at a time: no second set of all exists."""
        for owners in in_pieces(scaled, _UNSCALED_BYTES):
            unscaled = self._read(owners, lambda *owner: scaled[owner] / scale.to(scaled[owner].device))
            self._batches.accumulate(owners, unscaled)

    def measure_gradients(self) -> None:
        """Measures the gradients that are there and were not, in this step; optimizers do not measure them again."""
        if self._store.flags.is_open():
            self._measure_identities(None)
            self._measure_timed(self._measure_gradients)

    def measure_before_clipping(self, tensors: list[torch.Tensor]) -> list[tuple[Entry, torch.Tensor]] | None:
        """The same; and the sites that hold these parameters' gradients, and nothing else. None: some have none now."""
        if not self._store.flags.is_open() or is_capturing():
            return None
        self._measure_identities(None)
        found: list[tuple[Entry, torch.Tensor]] | None = self._measure_timed(self._measure_before_clipping, tensors)
        return found

    def _measure_before_clipping(self, tensors: list[torch.Tensor]) -> list[tuple[Entry, torch.Tensor]] | None:
        sites = {id(found): each.entries["param_grad"] for each, found in self._measure_gradients().items()}
        gradients = {id(tensor.grad): tensor.grad for tensor in tensors if tensor.grad is not None}
        pairs = [(sites.get(id(local_part(each))), each) for each in gradients.values()]
        is_twice = len(gradients) < sum(tensor.grad is not None for tensor in tensors)
        known = [(site, each) for site, each in pairs if site is not None]
        return None if is_twice or len(known) < len(pairs) else known

    def _measure_gradients(self) -> dict[Parameter, torch.Tensor]:
        """Measure gradients, and return those that were measured now and hold memory that nothing else does."""
        owners = [(each, "param_grad") for each in self._parameters.all if each.measures("param_grad")]

        def gradient(each: Parameter, kind: str) -> torch.Tensor | None:
            tensor = None if kind in each.measured else each.get()
            return None if tensor is None else find_part(self._binder, each, kind, tensor.grad)

        gradients = self._read(owners, gradient)
        self._note(owners, gradients, by_optimizer=True, before=True)
        for (each, _), found in zip(owners, gradients, strict=True):
            each.is_unclipped |= found is not None
        failed = self._batches.accumulate(owners, gradients)
        self.local_gradients.sample_reduced(self._parameters.all)
        return {
            each: found
            for number, ((each, kind), found) in enumerate(zip(owners, gradients, strict=True))
            if found is not None and number not in failed and kind not in each.captured
        }

    def _read(
        self, owners: list[Owner], read: Callable[[Parameter, str], torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Read each; one that cannot be read is left out, the others are not."""
        found: list[torch.Tensor | None] = []
        for each, kind in owners:
            tensor = None
            try:
                tensor = read(each, kind)
            except Exception as error:
                if self._store.strict:
                    raise
                self._binder.leave_out([each.entries[kind]], error)
            found.append(tensor)
        return found

    def _note(
        self, owners: list[Owner], found: list[torch.Tensor | None], by_optimizer: bool, before: bool = False
    ) -> None:
        """These have been measured together in the open step, as far as they were found. before: clipping, maybe."""
        self._readings += OCCASIONS
        capturing = is_capturing()
        for (each, kind), tensor in zip(owners, found, strict=True):
            if tensor is None:
                continue
            if kind not in each.measured:
                each.entries[kind].reading = self._readings + (BEFORE_CLIPPING if before else 1 + by_optimizer)
            each.measured[kind] = by_optimizer
            if capturing:
                each.captured.add(kind)

    @staticmethod
    def _is_wanted(each: Parameter, kind: str, by_optimizer: bool) -> bool:
        if kind == "param_grad" and each.is_unclipped:
            return False
        if not by_optimizer:  # what a CUDA graph has is measured in its replays
            return kind not in each.measured and kind not in each.captured
        if each.measured.get(kind) is False:  # already in this step, when somebody asked
            each.measured[kind] = True
            return False
        return True

    def _copy(self, stepping: list[Parameter]) -> None:
        owners = [(each, "param_update") for each in stepping if each.measures("param_update")]

        def copy(each: Parameter, _: str) -> torch.Tensor | None:
            local = local_part(each.get())
            return local.detach().clone() if local is not None and self._may_copy(each, local) else None

        copies = self._read(owners, copy)
        self._stepping.copies = {
            each: before for (each, _), before in zip(owners, copies, strict=True) if before is not None
        }

    def _sample(self, stepping: list[Parameter]) -> list[Parameter]:
        """Sample what is compared when they have stepped."""
        if self._between is not None:
            self._measure_changes(self._between.take_found(stepping), by_optimizer=True, kind=OUTSIDE)
        chosen = [each for each in stepping if any(each.measures(kind) for kind in SAMPLES)]
        return list(self._samples.take(chosen, changes=False))

    def _sample_the_others(self) -> None:
        """Sample parameters that no optimizer has stepped: by how much they have changed since the last sample."""
        others = [
            each
            for each in self._parameters.all
            if any(
                kind in _OF_VALUES and not entry.given_up and self._is_wanted(each, kind, by_optimizer=False)
                for kind, entry in each.entries.items()
            )
        ]
        known = [each for each in others if each in self._samples.taken and not each.is_buffer]
        new = [each for each in others if each not in self._samples.taken or each.is_buffer]
        changed = self._samples.take(known, changes=True)
        self._measure_changes(changed, by_optimizer=False)
        self._unstepped = changed | self._samples.take(new, changes=False)

    def _measure_changes(
        self, samples: dict[Parameter, Sample], by_optimizer: bool, kind: str = "update_sample"
    ) -> None:
        owners = [(each, kind) for each in samples if each.measures(kind)]
        if owners:
            changes: list[torch.Tensor | None] = [samples[each].differences for each, _ in owners]
            self._note(owners, changes, by_optimizer)
            self._batches.accumulate(owners, changes)

    def _measure_updates(self) -> None:
        sampled, self._stepping.sampled = self._stepping.sampled, []
        updated = [each for each in sampled if any(map(each.measures, _OF_CHANGES))]
        samples = self._samples.take(updated, changes=True)
        self._measure_changes(samples, by_optimizer=True)
        if self._between is not None:
            self._between.keep_samples(samples)
        if self._law is not None:
            ratios = self._law.after(samples)
            owners = [(each, LAW) for each in ratios]
            self._note(owners, list(ratios.values()), by_optimizer=True)
            self._batches.accumulate(owners, list(ratios.values()))
        copies, self._stepping.copies = self._stepping.copies, {}
        owners = [(each, "param_update") for each in copies]

        def update(each: Parameter, kind: str) -> torch.Tensor | None:
            now, before = find_part(self._binder, each, kind, each.get()), copies[each]
            return (
                torch.sub(now.detach(), before, out=before) if now is not None and now.shape == before.shape else None
            )

        self._batches.accumulate(owners, self._read(owners, update))

    def _measure_timed(self, measure: Callable[..., Any], *args: Any) -> Any:
        """`_carefully`, as a part of what hookstats takes of a step."""
        with self._store.flags.span():
            return self._carefully(measure, *args)

    def _carefully(self, measure: Callable[..., Any], *args: Any) -> Any:
        """Run one thread after the other. What fails as a whole is left out of this step, not of the next."""
        if not self._parameters.all:
            return None
        try:
            with self._store.lock:
                return measure(*args)
        except Exception as error:
            if self._store.strict:
                raise
            entries = [entry for each in self._parameters.all for entry in each.entries.values() if not entry.given_up]
            self._binder.leave_out(entries, error)
            return None

    def close_step(self) -> None:
        """Measure what was not measured before; then the next step begins."""
        if self._frozen:
            self._carefully(self._add_unfrozen)
        if self._has_samples and self._store.flags.value:
            self._carefully(self._sample_the_others)
        self.measure()
        for each in (self.identities, self.adjoint):
            if each is not None:
                each.close_step()
        self._unstepped = {}
        self.reset()

    def read_whole(self) -> None:
        """Read all identities in the next measured steps: something was found."""
        if self.identities is not None:
            self.identities.read_whole()

    def begin_step(self) -> None:
        """No optimizer is stepping: one that raised did not say that it ended."""
        self._stepping.optimizers.clear()

    def reset(self) -> None:
        """Reset: nothing was measured in the open step; parameters may have been replaced since, or shared."""
        for each in self._parameters.all:
            each.measured.clear()
            each.is_unclipped = False
        self._stepping.copies = {}
        self._stepping.sampled = []
        if self._law is not None:
            self._law.end_step()
        self._parameters.may_be_outdated = True
        self.local_gradients.look_again()
