"""Recipes that the training tests use as a user would write them. Captured as user code, never imported by the tests."""

import torch
from torch import nn


class Net(nn.Module):
    """Convolution, batch norm and dropout: buffers and random numbers, so that a resume that forgets either shows."""

    def __init__(self, classes, hidden, dropout):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.drop = nn.Dropout(dropout)
        self.first = nn.Linear(4 * 64, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, image):
        x = torch.relu(self.first(self.drop(self.body(image.view(-1, 1, 8, 8)))))
        return self.head(self.drop(torch.relu(self.second(x))))


class Digits:
    def __init__(self, hidden=32, dropout=0.2):
        self.hidden, self.dropout = hidden, dropout

    def build_model(self, schema):
        return Net(schema.num_classes, self.hidden, self.dropout)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"])

    def predict(self, model, batch):
        return model(batch["image"])


class Scheduled(Digits):
    """With an optimizer, a scheduler and augmentation of its own."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

    def augment(self, batch, generator):
        noise = torch.randn(batch["image"].shape, generator=generator)
        return {**batch, "image": batch["image"] + 0.1 * noise}


class Slow(Digits):
    """Takes its time, so that a test can act in the middle of an epoch."""

    def __init__(self, seconds=0.1, **more):
        super().__init__(**more)
        self.seconds = seconds

    def loss(self, model, batch):
        import time

        if model.training:
            time.sleep(self.seconds)
        return super().loss(model, batch)


class Linear(Digits):
    """No dropout and no batch norm: its gradients are a plain mean over rows, whatever the number of ranks."""

    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, schema.num_classes))


class Broken(Digits):
    def loss(self, model, batch):
        if model.training:
            raise ValueError("this recipe is broken")
        return super().loss(model, batch)


class NoLoss:
    def build_model(self, schema):
        return nn.Linear(1, 1)


class OnlyLoss:
    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, schema.num_classes))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"])
