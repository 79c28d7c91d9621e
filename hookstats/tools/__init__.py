"""Changing, capturing and explaining what flows through a model."""
