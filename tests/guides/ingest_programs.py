"""Functions of the shape of the guide on data loading, written afresh. Captured, never imported."""

import os
import tempfile

import ray.train
import ray.train.torch
import torch
from torch import nn


def quickstart(config):
    model = nn.Sequential(nn.Linear(1, 1), nn.Sigmoid())
    loss_of = nn.BCELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(2):
        rows = 0
        for batch in shard.iter_torch_batches(batch_size=128, dtypes=torch.float32):
            x, y = torch.unsqueeze(batch["x"], 1), torch.unsqueeze(batch["y"], 1)
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            rows += len(y)
        print("epoch", epoch, "rows", rows, x.dtype)
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict()}, os.path.join(folder, "model.pt"))
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def keep(value):
    """What all of them report: their functions would have nothing to keep else."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(value, os.path.join(folder, "state.pt"))
        ray.train.report({"rows": float(value)}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def over_lines(config):
    """Walks lines of text twice, in batches of 128 at most."""
    lines = ray.train.get_dataset_shard("train")
    for _ in range(2):
        sizes, seen = [], set()
        for batch in lines.iter_batches(batch_size=128):
            sizes.append(len(batch["text"]))
            seen |= {*batch["text"]}
        print("sizes", *sizes, "different", len(seen), min(seen))
        keep(sum(sizes))


def tokenized(config):
    """Makes numbers of the words in a collate function, and learns to tell spam apart."""
    words = {}

    def collate(batch):
        label, text = zip(*(line.split("\t") for line in batch["text"]), strict=True)
        ids = [[words.setdefault(word, len(words) + 1) % 100 for word in line.split()] for line in text]
        padded = nn.utils.rnn.pad_sequence([torch.tensor(each) for each in ids], batch_first=True)
        return padded, torch.tensor([each == "spam" for each in label]).float()

    model = nn.Sequential(nn.EmbeddingBag(100, 8, padding_idx=0), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(4):
        for ids, label in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=64, collate_fn=collate):
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids).squeeze(1), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        keep(loss.item())


def over_both(config):
    """Walks the train rows and the held-out ones, both shared out or not."""
    for name in ("train", "val"):
        rows = sum(len(batch["x"]) for batch in ray.train.get_dataset_shard(name).iter_batches(batch_size=128))
        print(name, "rows", rows)
    keep(rows)


def numbers(config):
    """Walks numbers twice and prints the order of each epoch."""
    shard = ray.train.get_dataset_shard("train")
    for _ in range(2):
        order = [int(x) for batch in shard.iter_batches(batch_size=32, **config.get("options", {})) for x in batch["x"]]
        print(*order)
        keep(len(order))


def augmented(config):
    """Adds noise to prepared rows in each epoch, as transforms after `materialize()` do."""
    shard = ray.train.get_dataset_shard("train").materialize()
    for _ in range(2):
        clean, noisy = [], []
        for batch in shard.iter_torch_batches(batch_size=30):
            clean.append(batch["length"])
            noisy.append(batch["length"] + 0.01 * torch.randn_like(batch["length"]))
        print("range", float(torch.cat(clean).min()), float(torch.cat(clean).max()), len(torch.cat(clean)))
        keep(len(torch.cat(noisy)))


class OwnShards(ray.train.DataConfig):
    """Makes the workers' iterators itself, as Ray's own config does."""

    def configure(self, datasets, world_size, worker_handles, worker_node_ids, **others):
        shards = datasets["train"].streaming_split(world_size, equal=True, locality_hints=worker_node_ids)
        return [{"train": shard} for shard in shards]


split_both = ray.train.DataConfig(datasets_to_split=["train", "val"])


def normalize_length(batch):
    """A transform before the cache: once for all epochs."""
    batch["length"] = ((batch["length"] - 4.0) / 4.0).astype("float32")
    return batch
