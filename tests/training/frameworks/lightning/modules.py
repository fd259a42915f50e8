"""A LightningModule with chance in it, for digits."""

import pytorch_lightning as pl
import torch
from torch import nn

import penstock


class Digits(pl.LightningModule):
    def __init__(self, hidden: int = 32):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))

    def forward(self, batch):
        return self.layers(batch["image"])

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch), batch["label"])
        self.log("train/loss", loss)
        penstock.log("rows", len(batch["label"]), reduce="sum")
        return loss

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch), batch["label"])
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch["label"]))
        penstock.log("rows", len(batch["label"]), reduce="sum")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
