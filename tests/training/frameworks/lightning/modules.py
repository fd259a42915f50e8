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


class UsesTrainer(Digits):
    """With all that Lightning documents for a module that has a Trainer, and state of its own."""

    def __init__(self):
        super().__init__()
        self.layers, self.offset = None, 0.0

    def setup(self, stage):
        self.scale = nn.Linear(1, 1)

    def configure_model(self):
        if self.layers is None:
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, batch):
        return self.layers(batch["image"]) * self.scale.weight + torch.tensor([self.offset] + [0.0] * 9)

    def training_step(self, batch):
        self.offset = min(3.0, self.offset + 0.2)
        return super().training_step(batch, 0) * (1 + 0.01 * self.trainer.current_epoch)

    def validation_step(self, batch, batch_idx):
        assert not self.trainer.sanity_checking
        super().validation_step(batch, batch_idx)
        return self(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        rate = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=max(133, self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["offset"] = self.offset

    def on_load_checkpoint(self, checkpoint):
        self.offset = checkpoint["offset"]


class Counts(Digits):
    """Counts its steps where no checkpoint has them, and charts the mean of an epoch."""

    seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = super().training_step(batch, batch_idx) * min(1.0, self.seen / 20)
        self.log("train/mean", loss, on_step=False, on_epoch=True)
        return loss


class ThawsOnce(Digits):
    """Thaws a layer at a step that a continued run does not see again."""

    def __init__(self):
        super().__init__()
        self.layers[1].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 5:
            self.layers[1].requires_grad_(True)


class _Lowers(pl.Callback):
    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, trainer, *others):
        self.count += 1
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.01 * self.count


class Lowers(Digits):
    def configure_callbacks(self):
        return [_Lowers()]


class HalfKept(UsesTrainer):
    """Has a count that its hooks do not keep."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def training_step(self, batch):
        self.steps += 1
        return super().training_step(batch) * min(1.0, self.steps / 20)


class Averages(Digits):
    def configure_callbacks(self):
        return [pl.callbacks.EMAWeightAveraging(decay=0.9)]


class Broadcasts(Digits):
    """Compares each row with the labels of all."""

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch)[:, :1], batch["label"].float())
