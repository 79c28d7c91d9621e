"""Changes of parameters between the steps of optimizers: a sample after a measured step, against the next step's.

The next step of an optimizer is looked at whether it is measured or not. What was found waits in the sample's own
memory for the next measured one, which reports it as "outside_update".
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hookstats import _native
from hookstats.watch.batches import Parameter
from hookstats.watch.flags import is_capturing
from hookstats.watch.memory import local_part
from hookstats.watch.samples import Sample

KIND = "outside_update"


class BetweenSteps:
    """Parameters that wait for their next step, and what was found of them then."""

    def __init__(self) -> None:
        self._stepped: dict[Parameter, Sample] = {}  # since when nothing may write them
        self._found: dict[Parameter, Sample] = {}
        self._on: dict[torch.device, torch.Tensor] = {}  # a flag that is up in steps that are not measured, too

    @property
    def is_waiting(self) -> bool:
        """Say whether the next step of an optimizer is to be looked at."""
        return bool(self._stepped)

    def keep_samples(self, samples: dict[Parameter, Sample]) -> None:
        """Keep samples that were taken after a step."""
        self._stepped |= {each: sample for each, sample in samples.items() if each.measures(KIND)}

    def sample_again(self, stepping: Iterable[Parameter]) -> None:
        """Take samples again before these step, and by how much they have changed."""
        if is_capturing():
            return self._stepped.clear()  # a graph's replays do not come by here
        by_device: dict[torch.device, list[tuple[Parameter, Sample, torch.Tensor]]] = {}
        for each in stepping:
            sample = self._stepped.pop(each, None)
            tensor = None if sample is None else local_part(each.get())
            if sample is not None and tensor is not None and sample.fits(tensor):
                by_device.setdefault(tensor.device, []).append((each, sample, tensor))
        for device, found in by_device.items():
            values, differences = (
                [sample.values for _, sample, _ in found],
                [sample.differences for _, sample, _ in found],
            )
            _native.sample([tensor for *_, tensor in found], values, self._flag(device), differences)
            self._found |= {each: sample for each, sample, _ in found}

    def take_found(self, stepping: Iterable[Parameter]) -> dict[Parameter, Sample]:
        """Return the samples that were found to differ, once."""
        return {each: self._found.pop(each) for each in stepping if each in self._found and each.measures(KIND)}

    def _flag(self, device: torch.device) -> torch.Tensor:
        if device not in self._on:
            with torch.inference_mode(False):
                self._on[device] = torch.ones(1, dtype=torch.int32, device=device)
        return self._on[device]
