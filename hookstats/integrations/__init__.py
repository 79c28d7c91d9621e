"""Callbacks of trainers: `lightning.HookStats` and `transformers.HookStats`."""
