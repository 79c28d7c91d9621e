"""grad_of(): the gradient of any tensor in a forward pass. Knows torch alone."""

from __future__ import annotations

import weakref

import torch


def grad_of(tensor: torch.Tensor) -> KeptGradient:
    """Keeps the gradient of a tensor, as it is now, for after the backward pass.

        z = x + y
        kept = hookstats.grad_of(z)
        (w @ z).backward()
        kept.grad

    Unlike ``z.retain_grad()``, it is the gradient of `z` as it was here, though `z` is changed in place later. Inside a
    compiled function it breaks the graph (and is refused under ``fullgraph=True``).

    Args:
        tensor: one that requires grad; a leaf, too.

    Raises:
        TypeError: for what is no tensor. ValueError: for one that does not require grad.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"grad_of: expected a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.requires_grad:
        raise ValueError(
            f"grad_of: expected a tensor that requires grad, got {tensor.dtype} {list(tensor.shape)} that does not: it "
            "was detached, made under no_grad, or made of nothing that requires grad"
        )
    return KeptGradient(tensor)


# What torch.compiler.disable(reason=...) does, which imports the compiler: two seconds for everybody.
grad_of._torchdynamo_disable = True  # type: ignore[attr-defined]
grad_of._torchdynamo_disable_msg = "hookstats.grad_of keeps a gradient for Python, outside of any graph"  # type: ignore[attr-defined]


class KeptGradient:
    """Result of `grad_of`. As a context manager, it is removed at the end; gradients that have come stay."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._grad: torch.Tensor | None = None
        self._is_view = tensor._is_view()
        self._version = tensor._version
        self._tensor = weakref.ref(tensor)
        self._handle = tensor.register_hook(self._add)

    def _add(self, gradient: torch.Tensor) -> None:
        gradient = gradient.detach()
        # A copy: autograd may go on to use the gradient's own memory, for the gradient of a parameter, say.
        self._grad = gradient.clone() if self._grad is None else self._grad + gradient

    @property
    def grad(self) -> torch.Tensor:
        """The gradient, of the tensor's shape and dtype; the sum where several backward passes have come by.

        RuntimeError while there is none, which says why.
        """
        if self._grad is None:
            raise RuntimeError(f"grad_of: no gradient has come: {self._reason()}")
        return self._grad

    def _reason(self) -> str:
        tensor = self._tensor()
        if self._is_view and tensor is not None and tensor._version != self._version:
            return (
                "the tensor is a view, and it or what it is a view of was changed in place afterwards: its gradient "
                "goes another way then. Call grad_of after the change, or on a tensor that is no view"
            )
        return (
            "backward was not called, or what it was called on does not depend on the tensor (it was not used, or only "
            "detached or under no_grad)"
        )

    def remove(self) -> None:
        """Stops keeping gradients."""
        self._handle.remove()

    def __enter__(self) -> KeptGradient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"KeptGradient({'none yet' if self._grad is None else list(self._grad.shape)})"
