"""torchvision: Faster R-CNN, whose losses come as a dict and whose boxes are of any number."""

import torch
import torchvision
from torchvision.models.detection.faster_rcnn import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator

import hookstats  # +


def train() -> torch.nn.Module:
    backbone = torchvision.models.mobilenet_v3_small(weights=None).features
    backbone.out_channels = 576
    anchors = AnchorGenerator(((16, 32, 64),), ((0.5, 1.0, 2.0),))
    pooler = torchvision.ops.MultiScaleRoIAlign(["0"], 7, 2)
    model = FasterRCNN(backbone, 3, min_size=96, max_size=128, rpn_anchor_generator=anchors, box_roi_pool=pooler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)
    monitor = hookstats.attach(model, sinks=hookstats.record("runs"))  # +
    for step in range(12):
        images = [torch.rand(3, 96, 96 + 8 * (step % 3)) for _ in range(2)]
        boxes = torch.tensor([[8.0, 8.0, 40.0, 48.0], [30.0, 20.0, 90.0, 80.0]])
        targets = [{"boxes": boxes[: 1 + i], "labels": torch.tensor([1, 2])[: 1 + i]} for i in range(2)]
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)  # +
    monitor.detach()  # +
    return model
