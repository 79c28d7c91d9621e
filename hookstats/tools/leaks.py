"""Results of a probe, as values and as text."""

from __future__ import annotations

from dataclasses import dataclass

WAYS = {
    "samples": "samples reach each other",
    "places in the batch": "the result depends on a sample's place in the batch",
    "later tokens": "later tokens reach earlier ones",
    "documents": "packed documents reach each other",
    "padding": "padding reaches tokens",
    "positions": "padding on the left shifts the positions of tokens",
}


@dataclass(frozen=True)
class Leak:
    """A module whose result depends on what it must not depend on."""

    kind: str
    """``"samples"``, ``"places in the batch"``, ``"later tokens"``, ``"documents"``, ``"padding"``, ``"positions"``."""
    module: str
    """Its clean name; ``""`` for the model's own code."""
    type: str
    """Its class."""
    seen_at: str
    """The place where it was seen first: in the output of the module itself, or in what it gave to this one."""
    modes: tuple[str, ...]
    """In which it was seen: ``"eval"``, ``"train"``."""
    first: tuple[int, ...]
    """The first place that changed: (sample,), or (sample, token)."""
    changed: int
    """The number of such places that changed,"""
    judged: int
    """of how many that must not."""
    difference: float
    """The largest difference of an element, over the largest magnitude of the output."""
    bound: float
    """The part of that which rounding explains."""
    cause: str
    """The known cause of this."""
    is_by_design: bool = False
    """True: of BatchNorm in training mode, which is made to do this."""

    @property
    def sentence(self) -> str:
        """Return a sentence: which module, in which mode, what reaches what, how far, and where to look."""
        name = f"{self.module or 'the model itself'} ({self.type})"
        if self.seen_at != self.module:
            name += f", in what it gives to {self.seen_at}"
        where = " and ".join(f"{mode}()" for mode in self.modes)
        unit = "samples" if len(self.first) == 1 else "tokens"
        first = f"sample {self.first[0]}" + (f", token {self.first[1]}" if len(self.first) > 1 else "")
        return (
            f"{name}: {WAYS[self.kind]}, in {where}. {self.changed} of {self.judged} {unit} changed that must not, the "
            f"first is {first}, by up to {self.difference:.2g} of the largest magnitude (rounding explains "
            f"{self.bound:.1g}): {self.cause}."
        )


@dataclass(frozen=True)
class Probe:
    """Result of `probe`; printed, a text."""

    leaks: tuple[Leak, ...]
    """All that reaches where it must not, in the order of questions and modules."""
    by_design: tuple[Leak, ...]
    """The leaks of BatchNorm in training mode, as it is meant to work."""
    asked: dict[str, tuple[str, ...]]
    """Each question, and in which modes it was asked."""
    not_asked: dict[str, str]
    """The other questions, and why not."""
    modules: int
    """The number of modules that were compared."""
    notes: tuple[str, ...]
    """Notes: modules that could not be judged, differences that rounding explains."""

    def __str__(self) -> str:
        lines = [f"{len(self.leaks)} leak{'s' * (len(self.leaks) != 1)} in {self.modules} modules"]
        lines += [f"- {leak.sentence}" for leak in self.leaks]
        if self.by_design:
            first, *others = self.by_design
            more = f", and {len(others)} more" if others else ""
            lines.append(f"by design: {first.module or 'the model itself'} ({first.type}){more}: {first.cause}")
        said = (f"{kind} ({' and '.join(f'{mode}()' for mode in modes)})" for kind, modes in self.asked.items())
        lines.append(f"asked: {', '.join(said)}")
        lines += [f"not asked: {kind}: {reason}" for kind, reason in self.not_asked.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
