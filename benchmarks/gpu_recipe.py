"""The network of benchmarks/gpu_loop.py: 23 million weights, whose checkpoint is 275 MB with AdamW's averages."""

import itertools

import torch
from torch import nn


class Wide:
    """Six layers over the bytes of an image; the label is the row's number, of which the last digit is learned."""

    def build_model(self, schema):
        sizes = [3072, 2048, 2048, 2048, 2048, 2048]
        layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"].float() / 255), batch["label"] % 10)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
