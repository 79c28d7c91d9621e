"""pytorch/examples' word language model: an LSTM, backpropagation through a part of the text, SGD by hand."""

import torch
from torch import nn

import hookstats  # +


class RNNModel(nn.Module):
    def __init__(self, words: int = 50, width: int = 64, layers: int = 2):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder, self.decoder = nn.Embedding(words, width), nn.Linear(width, words)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        for weight in (self.encoder.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, ids, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden


def repackage_hidden(hidden):
    return hidden.detach() if isinstance(hidden, torch.Tensor) else tuple(repackage_hidden(each) for each in hidden)


def train() -> torch.nn.Module:
    model, criterion, lr = RNNModel(), nn.NLLLoss(), 2.0
    text = (torch.arange(20 * 321) ** 2 % 47).view(20, -1).t().contiguous()  # 20 columns of text
    monitor = hookstats.attach(model, sinks=hookstats.record("runs"))  # +
    hidden = tuple(torch.zeros(2, 20, 64) for _ in range(2))
    model.train()
    for start in range(0, len(text) - 1, 10):
        ids, targets = text[start : start + 10], text[start + 1 : start + 11].flatten()
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(ids, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        monitor.step(loss=loss)  # +
    monitor.detach()  # +
    return model
