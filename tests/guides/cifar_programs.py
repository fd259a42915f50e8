"""Functions of the shape of the guide that distributes a PyTorch training, written afresh. Captured, never imported."""

import os
import tempfile

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Patches(nn.Module):
    """A small vision transformer: images [rows, 3, 32, 32] as 16 patches."""

    def __init__(self, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.places = nn.Parameter(torch.zeros(16, width))
        self.body = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, image):
        return self.head(self.body(self.patches(image).flatten(2).transpose(1, 2) + self.places).mean(1))


def loaders(batch_size):
    """The colours of a picture tell its class."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(96) % 10
    image = torch.rand(96, 3, 32, 32, generator=generator) * 0.2 + label.reshape(-1, 1, 1, 1) / 10
    train, held = TensorDataset(image[:64], label[:64]), TensorDataset(image[64:], label[64:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(held, batch_size=batch_size)


def on_one_machine():
    """The first step of the guide: nothing of Ray in it."""
    train, _ = loaders(32)
    model, loss_of = Patches(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in train:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print({"loss": loss.item()})


def with_own_loaders(config):
    """The second step: torch's loaders, prepared by Ray Train."""
    train, valid = loaders(config["batch_size_per_worker"])
    train = ray.train.torch.prepare_data_loader(train)
    valid = ray.train.torch.prepare_data_loader(valid)
    model = ray.train.torch.prepare_model(Patches())
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=1e-2)
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            train.sampler.set_epoch(epoch)
        rows = 0
        for x, y in train:
            learn(model, optimizer, loss_of, x, y)
            rows += len(y)
        loss, accuracy, _ = validate(model, loss_of, valid)
        print("epoch", epoch, "rows", rows)
        save(model, {"loss": loss, "accuracy": accuracy})


def with_ray_data(config):
    """The third step: both loaders are made once, before the epochs, and walked in each."""
    train = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=config["batch_size_per_worker"])
    valid = ray.train.get_dataset_shard("valid").iter_torch_batches(batch_size=config["batch_size_per_worker"])
    model = ray.train.torch.prepare_model(Patches())
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=1e-2)
    first_epoch = restore(model, optimizer) if config.get("restores") else 0
    for epoch in range(first_epoch, config["epochs"]):
        model.train()
        rows = batches = 0
        for batch in train:
            learn(model, optimizer, loss_of, batch["image"], batch["label"])
            rows, batches = rows + len(batch["label"]), batches + 1
        loss, accuracy, held = validate(model, loss_of, ((batch["image"], batch["label"]) for batch in valid))
        if ray.train.get_context().get_world_rank() == 0:
            print("epoch", epoch, "rows", rows, "batches", batches, "held", held)
        save(model, {"loss": loss, "accuracy": accuracy}, optimizer, epoch)


def learn(model, optimizer, loss_of, x, y):
    loss = loss_of(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def validate(model, loss_of, batches):
    model.eval()
    loss, right, seen, count = 0, 0, 0, 0
    with torch.no_grad():
        for x, y in batches:
            scores = model(x)
            loss += loss_of(scores, y).item()
            seen += y.shape[0]
            count += 1
            right += (scores.argmax(1) == y).sum().item()
    return loss / count, right / seen, seen


def save(model, metrics, optimizer=None, epoch=0):
    """Every worker gives a folder, as the guide has it."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(getattr(model, "module", model).state_dict(), os.path.join(folder, "model.pt"))
        if optimizer is not None:
            torch.save({"optimizer": optimizer.state_dict(), "epoch": epoch}, os.path.join(folder, "rest.pt"))
        ray.train.report(metrics=metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def restore(model, optimizer):
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        getattr(model, "module", model).load_state_dict(torch.load(os.path.join(folder, "model.pt"), weights_only=True))
        rest = torch.load(os.path.join(folder, "rest.pt"), weights_only=True)
    optimizer.load_state_dict(rest["optimizer"])
    return rest["epoch"] + 1


def to_unit_range(batch):
    """What the guide's map does to each row: to floats between -1 and 1, channels first."""
    batch["image"] = (batch["image"].astype("float32") / 127.5 - 1).transpose(0, 3, 1, 2).copy()
    return batch


def load_model(folder, config):
    model = Patches()
    model.load_state_dict(torch.load(os.path.join(folder, "model.pt"), weights_only=True))
    return model


def predict(model, batch):
    return model(batch["image"])
