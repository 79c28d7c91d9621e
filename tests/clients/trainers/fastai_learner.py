"""fastai: a Learner with the one-cycle schedule; its callbacks are told of each step."""

import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import *  # noqa: F403
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from sklearn.datasets import load_digits

import hookstats  # +


def train() -> torch.nn.Module:
    class Watch(Callback):  # +
        def before_fit(self):  # +
            options = hookstats.Options(training_only=True)  # +
            self.monitor = hookstats.attach(self.model, options=options, sinks=hookstats.record("runs"))  # +

        def after_step(self):  # +
            self.monitor.step(loss=self.loss)  # +

        def after_fit(self):  # +
            self.monitor.detach()  # +

    images, labels = load_digits(return_X_y=True)
    rows = list(zip(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels), strict=True))
    train_rows = torch.utils.data.DataLoader(rows[:1500], batch_size=64, shuffle=True)
    loaders = DataLoaders(train_rows, torch.utils.data.DataLoader(rows[1500:], batch_size=64))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    learner = Learner(loaders, model, loss_func=torch.nn.CrossEntropyLoss())
    learner.add_cb(Watch())  # +
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(1, 1e-2)
    return model
