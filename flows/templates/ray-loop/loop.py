"""A training function as Ray Train's guides write it: it imports nothing of penstock, and TorchTrainer runs it, too."""

import os
import tempfile

import ray.train
import ray.train.torch
import torch
from torch import nn


class Digits(nn.Module):
    """Pictures [rows, 64] of 0 to 16 to scores [rows, 10]."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(width * 16, 10),
        )

    def forward(self, image):
        return self.layers(image.reshape(-1, 1, 8, 8).float() / 16)


def train_func(config):
    """What `train.loop` in pipeline.yaml names; `train.params` are its config."""
    model = ray.train.torch.prepare_model(Digits(config["width"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    first_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        plain(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"]
    train, validation = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("validation")
    for epoch in range(first_epoch, config["epochs"]):
        model.train()
        for batch in train.iter_torch_batches(batch_size=config["batch_size"]):
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = rows = 0
        with torch.no_grad():
            for batch in validation.iter_torch_batches(batch_size=256):
                right += (model(batch["image"]).argmax(1) == batch["label"]).sum().item()
                rows += len(batch["label"])
        metrics = {"train/loss": loss.item(), "val/accuracy": right / rows, "epoch": epoch}
        if ray.train.get_context().get_world_rank() > 0:
            ray.train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": plain(model).state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, os.path.join(folder, "state.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def plain(model):
    """The model without DistributedDataParallel around it."""
    return getattr(model, "module", model)


def load_model(folder, config):
    """The model of a reported folder: with it, the test split is measured and the registered model answers."""
    model = Digits(config["width"])
    model.load_state_dict(torch.load(os.path.join(folder, "state.pt"), weights_only=True)["model"])
    return model


def predict(model, batch):
    """Scores, rows first, of a dict of column name to tensor."""
    return model(batch["image"])
