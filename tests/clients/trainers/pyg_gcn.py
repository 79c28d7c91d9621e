"""PyG: a graph convolutional network on one graph of two thousand nodes, which is made here."""

import torch
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import hookstats  # +


class GCN(torch.nn.Module):
    def __init__(self, features: int, hidden: int, classes: int):
        super().__init__()
        self.conv1 = GCNConv(features, hidden, cached=True)
        self.conv2 = GCNConv(hidden, classes, cached=True)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def graph(nodes: int = 2000, features: int = 64, classes: int = 7) -> Data:
    """Most edges join nodes of one class, whose features have one mean."""
    y = torch.arange(nodes) % classes
    start = torch.randint(nodes, (4 * nodes,))
    alike = (start + classes * torch.randint(nodes // classes, start.shape)) % (nodes // classes * classes)
    end = torch.where(torch.rand(start.shape) < 0.8, alike, torch.randint(nodes, start.shape))
    x = torch.randn(classes, features)[y] + torch.randn(nodes, features)
    edges = torch.stack([torch.cat([start, end]), torch.cat([end, start])])
    return Data(x=x, edge_index=edges, y=y, train_mask=torch.rand(nodes) < 0.3)


def train() -> torch.nn.Module:
    data = graph()
    model = GCN(data.num_features, 16, 7)
    decayed = [{"params": model.conv1.parameters(), "weight_decay": 5e-4}, {"params": model.conv2.parameters()}]
    optimizer = torch.optim.Adam(decayed, lr=0.01)
    options = hookstats.Options(training_only=True)  # +
    monitor = hookstats.attach(model, options=options, sinks=hookstats.record("runs"))  # +
    for _ in range(60):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)  # +
        model.eval()
        with torch.no_grad():
            model(data.x, data.edge_index)
    monitor.detach()  # +
    return model
