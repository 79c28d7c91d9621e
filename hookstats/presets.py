"""Arguments for `hookstats.attach`, found by looking at a model; to be looked at, and changed."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from hookstats.language.finding import attentions, routers
from hookstats.modules.selection import list_modules
from hookstats.watch.arguments import DEFAULT_TENSORS

_log = logging.getLogger("hookstats")


def language_model(model: nn.Module) -> dict[str, Any]:
    """Arguments for language models: the defaults of `attach`, optimizer states, weights of tokens, attention, routers.

        monitor = hookstats.attach(model, **hookstats.presets.language_model(model))

    Returns ``{"tensors": (...)}``: attach's default, ``"optimizer"``, ``"token_weights"``, with ``"attention"`` where
    a module computes attention, and ``"router"`` where one chooses experts. What was found is logged at INFO.

    Raises:
        TypeError: for what is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"language_model: expected a torch.nn.Module, got {type(model).__name__}")
    modules = list_modules(model, None)
    attending, routing = attentions(modules), routers(modules)
    tensors = [*DEFAULT_TENSORS, "optimizer", "token_weights"]
    if attending:
        tensors.append("attention")
    if routing:
        tensors.append("router")
    numbers = sorted({(router.experts, router.top_k) for router in routing.values()}, key=str)
    experts = ", ".join(f"{count} experts, top {'?' if top_k is None else top_k}" for count, top_k in numbers)
    _log.info(
        "found %d modules that may compute attention, and %d routers%s",
        len(attending),
        len(routing),
        f" ({experts})" if routing else "",
    )
    return {"tensors": tuple(tensors)}
