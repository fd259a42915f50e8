"""A LightningModule that tells malignant from benign tumours by measurements of their cells."""

import pytorch_lightning as pl
import torch
from torch import nn


class Diagnosis(pl.LightningModule):
    """What `train.recipe` in pipeline.yaml names; `train.params` are the arguments of `__init__`.

    A batch maps column names to tensors. Optimizers, schedulers and callbacks are yours, as in any LightningModule.
    """

    def __init__(self, hidden: int = 32, lr: float = 0.01, dropout: float = 0.2):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(30, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 2))

    def forward(self, batch):
        """One row of scores per patient: what metrics, figures and the registered model are made from."""
        return self.layers(batch["features"].to(torch.float32))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch), batch["diagnosis"], label_smoothing=0.05)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch), batch["diagnosis"])
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch["diagnosis"]))  # the mean over all workers' rows
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
