"""Where two runs part: by more than rounding explains, or how far apart they grow. No torch."""
