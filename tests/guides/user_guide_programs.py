"""Functions of the shape of Ray Train's user guide, with today's names, written afresh. Captured, never imported."""

import os
import tempfile

import ray.train
import ray.train.torch
import torch
import torchmetrics
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def items():
    x = torch.linspace(-1, 1, 48).reshape(-1, 1)
    return TensorDataset(x, 3 * x + 1)


def ported_by_hand(config):
    """A function for DDP as it was before Ray Train: its own wrapper, sampler and device."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    data = items()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    train_on(model, loader, 2)


def ported(config):
    """The same, with Ray Train's helpers."""
    model = ray.train.torch.prepare_model(nn.Linear(1, 1))
    loader = ray.train.torch.prepare_data_loader(DataLoader(items(), batch_size=8))
    world = ray.train.get_context().get_world_size()
    print("global batch", 8 * world)
    train_on(model, loader, 2)


def train_on(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        rows = 0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(x)
        print("epoch", epoch, "rows", rows)
        keep({"mse": loss.item()}, weights_of(model))


def keep(metrics, state):
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, os.path.join(folder, "state.pt"))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def weights_of(model):
    state = model.state_dict()
    consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def returns(config):
    """Gives back what it has collected."""
    results = []
    for number in range(config["num_epochs"]):
        results.append(number)
        keep({"number": number}, number)
    return results


def reports_numbers(config):
    """Three reports, each with its number."""
    for number in range(3):
        keep({"number": number, "accuracy": 0.5 + ray.train.get_context().get_world_rank()}, number)


def measured(config):
    """A metric of torchmetrics on numbers that are drawn here."""
    scores, truth = torch.randn(10, 5).softmax(dim=-1), torch.randint(5, (10,))
    accuracy = torchmetrics.functional.accuracy(scores, truth, task="multiclass", num_classes=5).item()
    keep({"accuracy": accuracy}, accuracy)


def on_toy_data(config):
    """Saves its weights after each epoch, and goes on from what is saved."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(100, 4, generator=generator), torch.rand(100, 1, generator=generator)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    first_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model_weights"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    model = ray.train.torch.prepare_model(model)
    print("begins at", first_epoch)
    for epoch in range(first_epoch, config["num_epochs"]):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = {"epoch": epoch, "model_weights": weights_of(model), "optimizer": optimizer.state_dict()}
        keep({"loss": loss.item()}, state)


def reports_losses(config):
    """Four checkpoints with the losses 2, 4, 1 and 3."""
    for loss in (2, 4, 1, 3):
        keep({"loss": loss}, loss)


def keeps_nothing(config):
    """Reports without a checkpoint."""
    for epoch in range(3):
        ray.train.report({"epoch": epoch})


def over_named_columns(config):
    """Pairs of features and labels of two datasets, in each epoch."""
    train, validation = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("validation")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def pairs(shard):
        for batch in shard.iter_torch_batches(batch_size=config["worker_batch_size"], dtypes=torch.float32):
            yield torch.stack([batch["a"], batch["b"]], 1), batch["label"].unsqueeze(1)

    for _ in range(config["num_epochs"]):
        model.train()
        for x, y in pairs(train):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            held = [nn.functional.mse_loss(model(x), y).item() * len(y) for x, y in pairs(validation)]
        keep({"held": sum(held) / validation.count()}, model.state_dict())


def by_to_torch(config):
    """Pairs of features and label, by Ray's own call."""
    pairs = ray.train.get_dataset_shard("train").to_torch(label_column="label", batch_size=config["worker_batch_size"])
    for epoch in range(config["num_epochs"]):
        sizes = [(tuple(x.shape), len(y)) for x, y in pairs]
        print("epoch", epoch, *sizes)
        keep({"batches": len(sizes)}, epoch)


def iter_epochs(config):
    next(ray.train.get_dataset_shard("train").iter_epochs())


def output_is_input(config):
    """For a sweep: what it reports is what it gets."""
    for _ in range(config["num_epochs"]):
        keep({"output": config["input"]}, config["input"])
