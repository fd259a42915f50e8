"""A training function with Accelerate, as its guide for Ray Train has it. Captured as user code."""

import os
import tempfile
import time

import ray.train
import torch
from accelerate import Accelerator
from torch import nn


def train_func(config):
    """Learns digits; the fourteenth step waits for the file `until`."""
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first_epoch, steps = 0, 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, steps = state["epoch"], state["steps"]
    model, optimizer = accelerator.prepare(model, optimizer)
    print("processes", accelerator.num_processes, "rank", accelerator.process_index)
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(first_epoch, 3):
        for batch in shard.iter_torch_batches(batch_size=16):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            while steps == 14 and not os.path.exists(config["until"]):
                time.sleep(0.05)
            if steps % 4 == 0:
                save(accelerator, model, optimizer, {"loss": loss.item()}, epoch, steps)
        seen = accelerator.gather_for_metrics(loss.detach())
        save(accelerator, model, optimizer, {"loss": seen.mean().item()}, epoch + 1, steps)


def save(accelerator, model, optimizer, values, epoch, steps):
    """Rank 0 gives the checkpoint."""
    if not accelerator.is_main_process:
        ray.train.report(values)
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = accelerator.unwrap_model(model).state_dict()
        state = {"model": plain, "optimizer": optimizer.state_dict(), "epoch": epoch, "steps": steps}
        torch.save(state, os.path.join(folder, "state.pt"))
        ray.train.report(values, checkpoint=ray.train.Checkpoint.from_directory(folder))
