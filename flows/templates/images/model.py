"""A small convolutional network that reads handwritten digits."""

import torch
from torch import nn


class Digits:
    """The recipe that `train.recipe` in pipeline.yaml names; `train.params` are the arguments of `__init__`.

    There is no base class. A recipe needs `build_model` and `loss`; everything else here is optional.
    """

    def __init__(self, width: int = 48, dropout: float = 0.3, learning_rate: float = 2e-3):
        self.width = width
        self.dropout = dropout
        self.learning_rate = learning_rate

    def build_model(self, schema):
        """Make the network. `schema` describes the columns of a batch and the classes of its label."""
        width, side = self.width, side_of(schema["image"].shape[0])
        # GroupNorm, because BatchNorm would depend on how a batch is divided among the workers.
        return nn.Sequential(
            nn.Unflatten(1, (1, side, side)),
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * width * (side // 2) ** 2, schema.num_classes),
        )

    def loss(self, model, batch):
        """The number to make small: a tensor with one element. `batch` maps column names to tensors."""
        return nn.functional.cross_entropy(self.predict(model, batch), batch["label"])

    def predict(self, model, batch):
        """One row of scores per image: what metrics, figures and the registered model are made from."""
        return model(batch["image"].float() / 16)

    def augment(self, batch, generator):
        """Shift each image of a training batch by up to one pixel. What `generator` draws follows from seed, epoch and row."""
        side = side_of(batch["image"].shape[1])
        padded = nn.functional.pad(batch["image"].unflatten(1, (side, side)), (1, 1, 1, 1))
        top, left = generator.integers(0, 3, 2).unbind(1)
        rows = torch.arange(len(padded))[:, None, None]
        down, right = torch.arange(side)[:, None], torch.arange(side)
        shifted = padded[rows, top[:, None, None] + down, left[:, None, None] + right]
        return {**batch, "image": shifted.flatten(1)}

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)

    def scheduler(self, optimizer):
        """Stepped after every optimizer step: the unit is steps."""
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=300, gamma=0.5)


def side_of(pixels: int) -> int:
    """Width and height of a square image that is stored as one row of `pixels` numbers."""
    return round(pixels**0.5)
