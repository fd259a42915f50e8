"""Functions written for Ray Train, in the style of its guides, that know nothing of penstock. Captured, never imported."""

import os
import tempfile
import time

import ray.train
import ray.train.torch
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class SmallResNet(nn.Module):
    """For grey images of one channel."""

    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, classes)

    def forward(self, image):
        x = self.blocks(torch.relu(self.stem(image.unsqueeze(1))))
        return self.head(x.mean((2, 3)))


def train_func(config):
    """A residual network on grey images, which saves and restores itself; its sixteenth step waits for the file `until`."""
    model = ray.train.torch.prepare_model(SmallResNet(10))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        getattr(model, "module", model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"]
    shard = ray.train.get_dataset_shard("train")
    if config.get("keeps"):
        shard = shard.materialize()
    rank = ray.train.get_context().get_world_rank()
    if config.get("looks"):
        shape = next(iter(shard.iter_torch_batches(batch_size=2)))["image"].shape
        torch.rand(len(shape))
    options = {"dtypes": {"image": torch.float32}, "drop_last": config.get("drop_last", False)}
    loader = shard.iter_torch_batches(batch_size=config["batch_size"], **options)
    steps = 0
    for epoch in range(first_epoch, config["epochs"]):
        model.train()
        if not config.get("once"):
            loader = shard.iter_torch_batches(batch_size=config["batch_size"], **options)
        for number, batch in enumerate(loader):
            if number == config.get("batches_an_epoch"):
                break
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            while steps == 16 and not os.path.exists(config.get("until", "/")):
                time.sleep(0.05)
            if steps % config.get("every", 10**9) == 0:
                report(model, optimizer, epoch, {"loss": loss.item()}, rank)
            if steps == config.get("dies_after"):
                raise RuntimeError("killed in the middle of an epoch")
        if epoch == config.get("dies_before_validation_of"):
            raise RuntimeError("killed at the end of an epoch")
        right, seen = 0, 0
        model.eval()
        for batch in ray.train.get_dataset_shard("validation").iter_torch_batches(
            batch_size=64, dtypes={"image": torch.float32}
        ):
            with torch.no_grad():
                right += (model(batch["image"]).argmax(1) == batch["label"]).sum().item()
            seen += len(batch["label"])
        print("epoch", epoch, "rows", seen)
        report(model, optimizer, epoch + 1, {"loss": loss.item(), "val/accuracy": right / seen, "epoch": epoch}, rank)


def report(model, optimizer, epoch, metrics, rank):
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": getattr(model, "module", model).state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, os.path.join(folder, "state.pt"))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def load_model(folder, config):
    model = SmallResNet(10)
    model.load_state_dict(torch.load(os.path.join(folder, "state.pt"), weights_only=True)["model"])
    return model


def predict(model, batch):
    return model(batch["image"])


def careful(config):
    """Keeps state of many kinds, and restores all of it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    noise = torch.Generator().manual_seed(3)
    shard, began_s = ray.train.get_dataset_shard("train"), time.time()
    first_epoch = batches = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        state = torch.load(os.path.join(checkpoint.path, "state.pt"), weights_only=True)
        for name, each in {"model": model, "optimizer": optimizer, "schedule": schedule}.items():
            each.load_state_dict(state[name])
        first_epoch, batches = state["first_epoch"], state["batches"]
        noise.set_state(state["noise"])

    def save(epoch):
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            state |= {"noise": noise.get_state(), "batches": batches, "first_epoch": epoch}
            torch.save(state, os.path.join(folder, "state.pt"))
            ray.train.report({"s": time.time() - began_s}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    for epoch in range(first_epoch, 2):
        for batch in shard.iter_torch_batches(batch_size=111):
            image = batch["image"] + 0.1 * torch.randn(batch["image"].shape, generator=noise)
            loss = nn.functional.cross_entropy(model(image), batch["label"]) / (1 + batches)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if config.get("chance"):
                torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
            batches += 1
            if batches == int(os.environ.get("DIES_AFTER", "0")):
                raise RuntimeError("killed behind a step")
            schedule.step()
            save(epoch)


def own_rows(config):
    """Rows of its own in an order that torch's generator draws; restores all."""
    from torch.utils.data import DataLoader

    loader = DataLoader([(torch.tensor([float(x)]), torch.tensor([3.0 * x + 1.0])) for x in range(32)], 8, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    first_epoch = 0
    if checkpoint := ray.train.get_checkpoint():
        state = torch.load(os.path.join(checkpoint.path, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"]
        torch.set_rng_state(state["random"])
    for epoch in range(first_epoch, 3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch + 1 == int(os.environ.get("DIES_AFTER", "0")):
            raise RuntimeError("killed behind a step")
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state | {"random": torch.get_rng_state()}, os.path.join(folder, "state.pt"))
            ray.train.report({"mse": loss.item()}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def linear_on_items():
    """No config, its own items and its own loader; the pipeline's rows are not used."""
    from torch.utils.data import DataLoader

    items = [(torch.tensor([float(x)]), torch.tensor([3.0 * x + 1.0])) for x in range(32)]
    loader = ray.train.torch.prepare_data_loader(DataLoader(items, batch_size=8))
    model = ray.train.torch.prepare_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        for x, y in loader:
            device = ray.train.torch.get_device()
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(getattr(model, "module", model).state_dict(), os.path.join(folder, "linear.pt"))
            ray.train.report({"mse": loss.item()}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def every_format(config):
    """Writes down what the shard gives in each form."""
    shard = ray.train.get_dataset_shard("train")
    kinds = [type(next(iter(shard.iter_batches(batch_format=f)))).__name__ for f in ("numpy", "pandas", "pyarrow")]
    collated = next(iter(shard.iter_torch_batches(batch_size=5, collate_fn=lambda rows: torch.as_tensor(rows["label"]) + 100)))
    rows = sum(len(batch["label"]) for batch in shard.iter_batches(batch_size=50))
    dropped = sum(len(batch["label"]) for batch in shard.iter_batches(batch_size=50, drop_last=True))
    one = next(iter(shard.iter_rows()))
    print(
        "forms",
        kinds,
        int(collated.min()) >= 100,
        len(collated),
        rows,
        dropped,
        one["image"].shape,
        shard.count(),
        shard.schema().names,
    )
    getattr(shard, config["asks"])(**config.get("arguments", {}))


def reports_alone(config):
    """As people write it: rank 0 alone reports."""
    if torch.distributed.get_rank() == config.get("rank", 0):
        ray.train.report({"loss": 1.0})


def without_checkpoint(config):
    ray.train.report({"loss": 1.0})


class VisionTransformer(nn.Module):
    """Colour images [rows, 3, 32, 32] as 16 patches."""

    def __init__(self, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.places = nn.Parameter(torch.zeros(16, width))
        self.body = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, image):
        return self.head(self.body(self.patches(image).flatten(2).transpose(1, 2) + self.places).mean(1))


def vision_transformer(config):
    """Two optimizers, one for the head and one for the rest; the rows come through a collate function of its own."""

    def colour(rows):
        grey = nn.functional.interpolate(torch.as_tensor(rows["image"]).unsqueeze(1), (32, 32))
        return {"image": grey.expand(-1, 3, -1, -1), "label": torch.as_tensor(rows["label"])}

    model = VisionTransformer()
    body = [parameter for name, parameter in model.named_parameters() if not name.startswith("head")]
    optimizers = [torch.optim.AdamW(body, config["lr"]), torch.optim.SGD(model.head.parameters(), config["lr"])]
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
    shard = ray.train.get_dataset_shard("train")
    for step, batch in enumerate(shard.iter_torch_batches(batch_size=config["batch_size"], collate_fn=colour), 1):
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
            torch.save(state, os.path.join(folder, "state.pt"))
            ray.train.report({"loss": loss.item()}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        if step == config.get("dies_after"):
            raise RuntimeError("killed in the middle of an epoch")


data_config = ray.train.DataConfig(datasets_to_split=["train"], enable_shard_locality=False)


class OwnShards(ray.train.DataConfig):
    def __init__(self):
        super().__init__(["train", "extra"], execution_options=self.default_ingest_options())


class OwnParts(ray.train.DataConfig):
    """Splits the rows that are learnt, and gives the others whole."""

    def configure(self, datasets, world_size, worker_handles, worker_node_ids, **others):
        parts = datasets["train"].streaming_split(world_size, equal=True, locality_hints=worker_node_ids)
        return [{"train": part, "val": datasets["val"].iterator()} for part in parts]


class OwnOrder(ray.train.DataConfig):
    def configure(self, datasets, *others, **more):
        return [{"train": part} for part in datasets["train"].random_shuffle().streaming_split(2)]


def reports_and_reduces(config):
    """Reports on worker 0 alone, after each batch; its gradients are added up over the workers."""
    for _batch in ray.train.get_dataset_shard("train").iter_batches(batch_size=32):
        torch.distributed.all_reduce(torch.ones(1))
        if torch.distributed.get_rank() == 0:
            ray.train.report({"loss": 1.0})


def reloads(config):
    """Reads back what it has reported, after its own folder is gone."""
    for epoch in range(2):
        next(iter(ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=8)))
        with tempfile.TemporaryDirectory() as folder:
            torch.save(torch.tensor(epoch), os.path.join(folder, "state.pt"))
            ray.train.report({"loss": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        with ray.train.get_checkpoint().as_directory() as folder:
            print("read back", torch.load(os.path.join(folder, "state.pt"), weights_only=True).item())
