"""ultralytics: YOLO by its own trainer, with warm-up, averaged weights and validation, on images that are made here."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from ultralytics import YOLO, settings

import hookstats  # +


def pictures(folder: Path, count: int) -> None:
    """Each with one light square, and where it lies."""
    numbers = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for i in range(count):
        pixels = numbers.integers(0, 90, (64, 64, 3), dtype=np.uint8)
        x, y = numbers.integers(0, 40, 2)
        pixels[y : y + 20, x : x + 20] += 120
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        (folder / "labels" / f"{i}.txt").write_text(f"0 {(x + 10) / 64} {(y + 10) / 64} {20 / 64} {20 / 64}\n")


def train() -> torch.nn.Module:
    settings.update({"sync": False})
    here = Path.cwd()
    pictures(here / "data", 32)
    Path("data.yaml").write_text(f"path: {here}/data\ntrain: images\nval: images\nnames: [square]\n")
    yolo = YOLO("yolo11n.yaml", verbose=False)

    def begin(trainer):  # +
        options = hookstats.Options(training_only=True)  # +
        trainer.monitor = hookstats.attach(trainer.model, options=options, sinks=hookstats.record("runs"))  # +
        trainer.optimizer.register_step_post_hook(lambda *_: trainer.monitor.step(loss=trainer.loss))  # +

    yolo.add_callback("on_train_start", begin)  # +
    yolo.add_callback("on_train_end", lambda trainer: trainer.monitor.detach())  # +
    yolo.train(
        data="data.yaml",
        epochs=2,
        imgsz=64,
        batch=8,
        nbs=8,
        device="cpu",
        workers=0,
        plots=False,
        verbose=False,
        project=str(here / "out"),
        pretrained=False,
    )
    return yolo.trainer.ema.ema
