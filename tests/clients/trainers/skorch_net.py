"""skorch: scikit-learn's interface; its callbacks are told of each batch."""

import numpy as np
import skorch
import torch
from sklearn.datasets import load_digits

import hookstats  # +


def train() -> torch.nn.Module:
    class Watch(skorch.callbacks.Callback):  # +
        def on_train_begin(self, net, **_):  # +
            options = hookstats.Options(training_only=True)  # +
            self.monitor = hookstats.attach(net.module_, options=options, sinks=hookstats.record("runs"))  # +

        def on_batch_end(self, net, training, loss, **_):  # +
            if training:  # +
                self.monitor.step(loss=loss)  # +

        def on_train_end(self, net, **_):  # +
            self.monitor.detach()  # +

    net = skorch.NeuralNetClassifier(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)),
        criterion=torch.nn.CrossEntropyLoss,
        max_epochs=2,
        verbose=0,
        callbacks=[Watch()],  # +
    )
    images, labels = load_digits(return_X_y=True)
    net.fit(images.astype(np.float32) / 16, labels)
    return net.module_
