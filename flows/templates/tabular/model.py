"""A small network that tells malignant from benign tumours by measurements of their cells."""

import torch
from torch import nn


class Diagnosis:
    """The recipe that `train.recipe` in pipeline.yaml names; `train.params` are the arguments of `__init__`.

    There is no base class. A recipe needs `build_model` and `loss`; everything else here is optional. This one defines no
    optimizer, so it gets AdamW with `train.learning_rate`.
    """

    def __init__(self, hidden: int = 32, dropout: float = 0.2):
        self.hidden = hidden
        self.dropout = dropout

    def build_model(self, schema):
        """Make the network. `schema` describes the columns of a batch and the classes of its label."""
        (num_features,) = schema["features"].shape
        return nn.Sequential(
            nn.Linear(num_features, self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, schema.num_classes),
        )

    def loss(self, model, batch):
        """The number to make small: a tensor with one element. `batch` maps column names to tensors."""
        return nn.functional.cross_entropy(self.predict(model, batch), batch["diagnosis"], label_smoothing=0.05)

    def predict(self, model, batch):
        """One row of scores per patient: what metrics, figures and the registered model are made from."""
        return model(batch["features"].to(torch.float32))
