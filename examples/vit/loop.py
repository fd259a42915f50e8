"""A vision transformer by a function for Ray Train: it knows nothing of penstock, and TorchTrainer runs it, too."""

import os
import tempfile

import ray.train
import ray.train.torch
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification


def build_model(config):
    """Begin from the config alone, with random weights."""
    width = config.get("hidden_size", 384)
    shape = ViTConfig(
        image_size=32,
        patch_size=config.get("patch_size", 4),
        num_hidden_layers=config.get("layers", 12),
        num_attention_heads=config.get("heads", 8),
        hidden_size=width,
        intermediate_size=2 * width,
        num_labels=10,
    )
    return ViTForImageClassification(shape)


def train_func(config):
    """Train on one worker or several: `batch_size` is that of all workers."""
    world = ray.train.get_context().get_world_size()
    rows = config["batch_size"] // world
    train_loader = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=rows)
    valid_loader = ray.train.get_dataset_shard("valid").iter_torch_batches(batch_size=rows)
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=1e-2)
    first_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    model = ray.train.torch.prepare_model(model)
    for epoch in range(first_epoch, config["epochs"]):
        model.train()
        sizes = []
        for batch in train_loader:
            loss = nn.functional.cross_entropy(scores(model, batch), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sizes.append(len(batch["label"]) * world)
        model.eval()
        held, right, seen = 0.0, 0, 0
        with torch.no_grad():
            for batch in valid_loader:
                found = scores(model, batch)
                held += nn.functional.cross_entropy(found, batch["label"], reduction="sum").item()
                right += (found.argmax(1) == batch["label"]).sum().item()
                seen += len(batch["label"])
        metrics = {"loss": held / seen, "accuracy": right / seen, "rows_of_a_step": max(sizes), "steps": len(sizes)}
        with tempfile.TemporaryDirectory() as folder:
            plain = getattr(model, "module", model)
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, os.path.join(folder, "state.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def scores(model, batch):
    """Pixels of 0 to 255 become floats of -1 to 1, channels first."""
    return model((batch["image"].permute(0, 3, 1, 2).float() / 127.5) - 1).logits


def load_model(folder, config):
    model = build_model(config)
    model.load_state_dict(torch.load(os.path.join(folder, "state.pt"), weights_only=True)["model"])
    return model


predict = scores
