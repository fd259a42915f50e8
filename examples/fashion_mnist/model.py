"""A small convolutional network for grey images of clothes."""

import torch
from torch import nn


class Clothes:
    """Three convolutions and a linear layer."""

    def __init__(self, width: int = 16, dropout: float = 0.2, learning_rate: float = 3e-3):
        self.width = width
        self.dropout = dropout
        self.learning_rate = learning_rate

    def build_model(self, schema):
        """`schema["image"].shape` is (784,): images arrive as rows of pixels."""
        side = round(schema["image"].shape[0] ** 0.5)
        return nn.Sequential(
            nn.Unflatten(1, (1, side, side)),
            *block(1, self.width),
            *block(self.width, 2 * self.width),
            *block(2 * self.width, 4 * self.width),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(4 * self.width * (side // 8) ** 2, schema.num_classes),
        )

    def loss(self, model, batch):
        return nn.functional.cross_entropy(self.predict(model, batch), batch["label"])

    def predict(self, model, batch):
        # Mean and standard deviation of the training pixels.
        return model((batch["image"].float() / 255 - 0.286) / 0.353)

    def augment(self, batch, generator):
        """Mirror half of the images: a shoe points left or right."""
        image = batch["image"]
        side = round(image.shape[1] ** 0.5)
        mirrored = image.unflatten(1, (side, side)).flip(2).flatten(1)
        return {**batch, "image": torch.where(generator.random(1) < 0.5, mirrored, image)}

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.05)


def block(inputs: int, outputs: int) -> list[nn.Module]:
    """Convolve, normalise, and halve height and width. GroupNorm does not depend on how a batch is divided among workers."""
    return [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2)]
