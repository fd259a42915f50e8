"""Is an invoice line a cancellation?"""

import torch
from torch import nn
from transforms import WORDS


class Cancelled:
    """Numbers of the line beside the mean of its description's word vectors, through two layers.

    Args:
        hidden: width of both.
        rare_weight: how much more a mistake on a cancelled line counts.
    """

    def __init__(self, hidden: int = 64, rare_weight: float = 10.0):
        self.hidden = hidden
        self.rare_weight = rare_weight

    def build_model(self, schema):
        return Line(schema["line"].shape[0], self.hidden, schema.num_classes)

    def loss(self, model, batch):
        """Divided by the rows, not by the weights: a mean over rows comes out the same on any number of workers."""
        label = batch["cancelled"]
        each = nn.functional.cross_entropy(self.predict(model, batch), label, reduction="none")
        return (each * torch.where(label == 1, self.rare_weight, 1.0)).mean()

    def predict(self, model, batch):
        return model(batch["line"], batch["words"])


class Line(nn.Module):
    """Numbers [rows, features] and words [rows, words] to scores [rows, classes]."""

    def __init__(self, features: int, hidden: int, classes: int):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, hidden, mode="mean", padding_idx=0)
        self.layers = nn.Sequential(
            nn.Linear(features + hidden, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, classes)
        )

    def forward(self, line, words):
        return self.layers(torch.cat([line.float(), self.words(words)], dim=1))
