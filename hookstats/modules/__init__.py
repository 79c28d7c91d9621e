"""Reading a model: which modules, which channels, what is in containers, the order of hooks. No device work."""
