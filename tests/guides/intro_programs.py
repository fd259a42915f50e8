"""Functions of the shape of the introduction to Ray Train and Ray Data, written afresh. Captured, never imported."""

import csv
import os
import tempfile

import numpy as np
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint
from torch import nn


def build_model():
    """A small residual network for grey images."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def train_loop_per_worker(config):
    """Worker 0 alone gives a folder; the global batch is divided by the workers."""
    model = build_model()
    model(torch.zeros(2, 1, 8, 8))
    model = ray.train.torch.prepare_model(model)
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    shard = ray.train.get_dataset_shard("train")
    rows_of_worker = config["batch_size"] // ray.train.get_context().get_world_size()
    for epoch in range(config["epochs"]):
        loader = shard.iter_torch_batches(
            batch_size=rows_of_worker, dtypes={"image": torch.float32, "label": torch.long}, device=ray.train.torch.get_device()
        )
        sizes = []
        for batch in loader:
            image, label = batch["image"], batch["label"]
            loss = loss_of(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sizes.append(len(label))
        print("epoch", epoch, "sizes", *sizes)
        save_and_report(model, {"loss": loss.item(), "epoch": epoch})


def save_and_report(model, metrics):
    if ray.train.get_context().get_world_rank() > 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(getattr(model, "module", model).state_dict(), os.path.join(folder, "model.pt"))
        with open(os.path.join(folder, "metrics.csv"), "w") as file:
            csv.writer(file).writerow(metrics.values())
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def one_skips(config):
    """What the guide's troubleshooting warns of: a report in an `if`."""
    if ray.train.get_context().get_world_rank() == 0:
        ray.train.report({"loss": 1.0})


def scaled(batch):
    """What the guide's map does to each row, of lists of lists."""
    batch["image"] = (np.stack(batch["image"]).astype("float32") / 8.0 - 1)[:, None]
    return batch


def load_model(folder, config):
    model = build_model()
    model(torch.zeros(2, 1, 8, 8))
    model.load_state_dict(torch.load(os.path.join(folder, "model.pt"), weights_only=True))
    return model
