"""Measurements of language models besides their modules' outputs: attention logits, routers."""
