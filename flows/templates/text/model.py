"""A recurrent network that learns to write Python: it guesses the next character of source text."""

import torch
from torch import nn
from transforms import ALPHABET


class NextCharacter:
    """The recipe that `train.recipe` in pipeline.yaml names; `train.params` are the arguments of `__init__`.

    There is no base class. A recipe needs `build_model` and `loss`; everything else here is optional.
    """

    def __init__(self, hidden: int = 128, learning_rate: float = 6e-3):
        self.hidden = hidden
        self.learning_rate = learning_rate

    def build_model(self, schema):
        """Make the network. `schema` describes the columns of a batch; this one needs none of it."""
        return Characters(self.hidden)

    def loss(self, model, batch):
        """Cross-entropy in nats per character: a tensor with one element. `batch` maps column names to tensors."""
        tokens = batch["tokens"].long()
        scores = model(tokens[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    def predict(self, model, batch):
        """Scores of the character that follows each row: [rows, 128]."""
        return model(batch["tokens"].long())[:, -1]

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)


class Characters(nn.Module):
    """Character codes [rows, length] to scores of each next character [rows, length, 128]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.embed = nn.Embedding(ALPHABET, hidden // 2)
        self.recur = nn.GRU(hidden // 2, hidden, batch_first=True)
        self.score = nn.Linear(hidden, ALPHABET)

    def forward(self, tokens):
        states, _ = self.recur(self.embed(tokens))
        return self.score(states)
