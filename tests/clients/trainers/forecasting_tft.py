"""pytorch-forecasting: a temporal fusion transformer, by Lightning."""

import lightning.pytorch
import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

import hookstats  # +
from hookstats.integrations.lightning import HookStats  # +


def train() -> torch.nn.Module:
    time = np.tile(np.arange(80), 6)
    group = np.repeat(np.arange(6), 80)
    frame = pd.DataFrame({"time": time, "group": group.astype(str), "value": np.sin(time / 5 + group)})
    series = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=16,
        max_prediction_length=4,
        static_categoricals=["group"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(series, hidden_size=8, lstm_layers=1, loss=QuantileLoss())
    lightning.pytorch.Trainer(
        max_steps=15,
        accelerator="cpu",
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[HookStats(sinks=hookstats.record("runs"))],  # +
    ).fit(model, series.to_dataloader(train=True, batch_size=32))
    return model
