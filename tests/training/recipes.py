"""Recipes that the training tests use as a user would write them. Captured as user code, never imported by the tests."""

import itertools

import torch
from torch import nn


class Net(nn.Module):
    """Convolution, batch norm and dropout: buffers and random numbers, so that a resume that forgets either shows."""

    def __init__(self, classes, hidden, dropout):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.drop = nn.Dropout(dropout)
        self.first = nn.Linear(4 * 64, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, image):
        x = torch.relu(self.first(self.drop(self.body(image.view(-1, 1, 8, 8)))))
        return self.head(self.drop(torch.relu(self.second(x))))


class Digits:
    def __init__(self, hidden=32, dropout=0.2):
        self.hidden, self.dropout = hidden, dropout

    def build_model(self, schema):
        return Net(schema.num_classes, self.hidden, self.dropout)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"])

    def predict(self, model, batch):
        return model(batch["image"])


class Scheduled(Digits):
    """With an optimizer, a scheduler and augmentation of its own."""

    def __init__(self, rate=0.05, **more):
        super().__init__(**more)
        self.rate = rate

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

    def augment(self, batch, generator):
        return {**batch, "image": batch["image"] + 0.1 * generator.normal(*batch["image"].shape[1:])}


class Modules(Digits):
    """Writes down what is loaded when the first step begins."""

    def __init__(self, file, **more):
        super().__init__(**more)
        self.file = file

    def loss(self, model, batch):
        import sys
        from pathlib import Path

        if not Path(self.file).exists():
            Path(self.file).write_text("\n".join(sys.modules))
        return super().loss(model, batch)


class Slow(Digits):
    """Takes its time, so that a test can act in the middle of an epoch; in its fourth step it waits for the file `until`."""

    def __init__(self, seconds=0.1, until=None, **more):
        super().__init__(**more)
        self.seconds, self.until = seconds, until
        self.next_step = itertools.count(1).__next__  # a count of a test's own, which no weight depends on, out of sight

    def loss(self, model, batch):
        import logging
        import sys
        import time
        from pathlib import Path

        if model.training:
            print("rows:", len(batch["label"]))
            print("and to stderr", file=sys.stderr)
            logging.getLogger("its.own").warning("and logged")
            time.sleep(self.seconds)  # a step of a network this small is over before a test can act
            step = self.next_step()
            while self.until and step == 4 and not Path(self.until).exists():
                time.sleep(0.05)
        return super().loss(model, batch)


class Linear(Digits):
    """No dropout and no batch norm: its gradients are a plain mean over rows, whatever the number of ranks."""

    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, schema.num_classes))


class Ages(Digits):
    """Its val/loss is the number of steps that it has learned: the first checkpoint is the best one, on any processor."""

    def loss(self, model, batch):
        return super().loss(model, batch) if model.training else model.body[1].num_batches_tracked.float()


class Broken(Digits):
    def loss(self, model, batch):
        if model.training:
            raise ValueError("this recipe is broken")
        return super().loss(model, batch)


class NoLoss:
    def build_model(self, schema):
        return nn.Linear(1, 1)


class OnlyLoss:
    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, schema.num_classes))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


class MixedDtypes(OnlyLoss):
    """bfloat16 weights with float32 averages, as optimizers for large models keep them."""

    def build_model(self, schema):
        return super().build_model(schema).to(torch.bfloat16)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["image"].to(torch.bfloat16)).float(), batch["label"])

    def optimizer(self, model):
        return Averaging(model.parameters())


class Averaging(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter, dtype=torch.float32))
                mean.mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
                parameter.sub_((group["lr"] * mean).to(parameter.dtype))


class Branches(Digits):
    """A model of which a step reaches parts: always `stem`, `odd` and `even` by what is in the batch, `never` in no step.

    Momentum and weight decay change a parameter with a gradient of zeros, and leave one without a gradient as it is.
    """

    def build_model(self, schema):
        heads = {name: nn.Linear(64, schema.num_classes) for name in ("never", "odd", "even", "stem")}
        return nn.ModuleDict(heads)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def loss(self, model, batch):
        image, label = batch["image"].flatten(1), batch["label"]
        scores = model["stem"](image)
        for name, rows in (("odd", label == 3), ("even", label == 4)):  # about one row in ten
            if rows.any():
                scores = scores + rows[:, None] * model[name](image)
        return nn.functional.cross_entropy(scores, label)

    def predict(self, model, batch):
        return model["stem"](batch["image"].flatten(1))


class Sparse(Branches):
    """An embedding with sparse gradients."""

    def build_model(self, schema):
        return nn.ModuleDict({**super().build_model(schema), "table": nn.Embedding(10, schema.num_classes, sparse=True)})


class Freezing(Branches):
    """Stops training a part after about twenty steps."""

    def loss(self, model, batch):
        if model["stem"].bias.abs().max() > 0.13:
            model["even"].requires_grad_(False)
        return super().loss(model, batch)


class Thawing(Branches):
    """Begins to train a part after some steps."""

    def build_model(self, schema):
        model = super().build_model(schema)
        model["even"].requires_grad_(False)
        return model

    def loss(self, model, batch):
        if model["stem"].bias.abs().max() > 0.05:
            model["even"].requires_grad_(True)
        return super().loss(model, batch)


class Chance(Digits):
    """Uses an operation that torch has no deterministic form of."""

    def loss(self, model, batch):
        image = batch["image"].put(torch.tensor([0]), torch.zeros(1))
        return super().loss(model, {**batch, "image": image})


class ChanceInPredict(Digits):
    """Uses such an operation where nothing is learned."""

    def predict(self, model, batch):
        return model(batch["image"].put(torch.tensor([0]), torch.zeros(1)))


class _Mean(nn.Module):
    """Adds the mean of all images that this rank has seen; their number is not a tensor."""

    def __init__(self):
        super().__init__()
        self.seen = 0
        self.register_buffer("mean", torch.zeros(8, 8))

    def forward(self, image):
        if self.training and len(image):
            self.seen += len(image)
            self.mean += (image.mean(0) - self.mean) * (len(image) / self.seen)
        return image

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Counting(Linear):
    """With a module whose state is more than tensors, and is not the same on every rank."""

    def build_model(self, schema):
        return nn.Sequential(_Mean(), super().build_model(schema))


class _Breaks(torch.optim.AdamW):
    steps = 0

    def step(self, *arguments, **options):
        super().step(*arguments, **options)
        self.steps += 1
        if self.steps == 4:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] = torch.nan


class NanWeights(Linear):
    """Its fourth step leaves a weight that is not a number."""

    def optimizer(self, model):
        return _Breaks(model.parameters())


class Detached(Linear):
    """Its third loss leads to no parameter."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        loss = super().loss(model, batch)
        return loss.detach() if self.calls == 3 else loss


class Logging(Digits):
    """Charts values of its own in three ways, and prints."""

    def loss(self, model, batch):
        import penstock

        rows = len(batch["label"])
        penstock.log("rows", rows, reduce="sum")
        penstock.log("mean_label", batch["label"].float().mean())
        if torch.rand(()) < 0.5:
            penstock.log("mine/sometimes", 1.0)
        print("label of the first row:", int(batch["label"][0]))
        loss = super().loss(model, batch)
        return {"loss": loss, "twice": 2 * loss}


class Gan:
    """Two networks and two optimizers; the critic counts its steps in a buffer, as spectral norm does."""

    predicts = "logits"

    def build_model(self, schema):
        critic = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(64, 16)), nn.ReLU(), nn.Linear(16, 1))
        return {"generator": nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64)), "critic": critic}

    def optimizer(self, models):
        return {
            "generator": torch.optim.Adam(models["generator"].parameters(), lr=2e-3, betas=(0.5, 0.9)),
            "critic": torch.optim.SGD(models["critic"].parameters(), lr=1e-2, momentum=0.9),
        }

    def scheduler(self, optimizers):
        return {"critic": torch.optim.lr_scheduler.ExponentialLR(optimizers["critic"], 0.98)}

    def training_step(self, models, batch, optimizers):
        real = batch["image"].flatten(1)
        fake = models["generator"](torch.randn(len(real), 8))
        critic = models["critic"]
        seen = nn.functional.softplus(-critic(real)).mean() + nn.functional.softplus(critic(fake.detach())).mean()
        optimizers["critic"].zero_grad()
        seen.backward()
        optimizers["critic"].step()
        fooled = nn.functional.softplus(-critic(fake)).mean()
        optimizers["generator"].zero_grad()
        fooled.backward()
        optimizers["generator"].step()
        return {"loss": seen + fooled, "critic": seen, "generator": fooled}

    def loss(self, models, batch):
        return nn.functional.softplus(-models["critic"](batch["image"].flatten(1))).mean()

    def predict(self, models, batch):
        return models["critic"](batch["image"].flatten(1))[:, 0]

    def metrics(self):
        from torchmetrics import MeanMetric

        return {"realism": MeanMetric(), "bright": MeanMetric()}

    def measure(self, metrics, output, batch):
        metrics["realism"].update(output.sigmoid())
        metrics["bright"].update(batch["image"].mean((1, 2)))


class LinearGan(Gan):
    """Draws nothing, and its gradients are plain means over rows."""

    def build_model(self, schema):
        return {"generator": nn.Linear(64, 64), "critic": nn.Linear(64, 1), "unused": nn.Linear(1, 1)}

    def optimizer(self, models):
        return {
            "generator": torch.optim.SGD(
                [*models["generator"].parameters(), *models["unused"].parameters()], lr=0.1, weight_decay=0.1
            ),
            "critic": torch.optim.Adagrad(models["critic"].parameters(), lr=0.01),
        }

    def training_step(self, models, batch, optimizers):
        real = batch["image"].flatten(1)
        fake = models["generator"](real.flip(1))
        seen = (
            nn.functional.softplus(-models["critic"](real)).mean()
            + nn.functional.softplus(models["critic"](fake.detach())).mean()
        )
        optimizers["critic"].zero_grad()
        seen.backward()
        optimizers["critic"].step()
        fooled = nn.functional.softplus(-models["critic"](fake)).mean()
        optimizers["generator"].zero_grad()
        fooled.backward()
        optimizers["generator"].step()
        return fooled


class Diary:
    """A callback that writes down what is called, and counts steps over stops."""

    def __init__(self, folder, stop_at=None, stop_on_rank=0, fail=False):
        self.file, self.stop_at, self.stop_on_rank, self.fail, self.count = folder + "/diary", stop_at, stop_on_rank, fail, 0

    def _write(self, training, what):
        if training.rank == 0:
            with open(self.file, "a") as file:
                file.write(f"{training.steps} {what}\n")

    def start(self, training):
        self._write(training, f"start {self.count}")

    def step(self, training):
        import penstock

        self.count += 1
        penstock.log("mine/count", self.count)
        if self.fail and training.steps == 3:
            raise ValueError("this callback is broken")
        if training.steps == self.stop_at and training.rank == self.stop_on_rank:
            training.stop("it is enough")

    def epoch(self, training):
        self._write(training, f"epoch {training.epochs}")

    def validation(self, training, metrics):
        self._write(training, f"validation {sorted(metrics)[-1]}")

    def checkpoint(self, training):
        self._write(training, "checkpoint")

    def failure(self, training, error):
        self._write(training, f"failure {type(error).__name__}")

    def end(self, training):
        self._write(training, f"end {self.count}")

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Keeps:
    """A callback whose state no checkpoint could give back."""

    def step(self, training):
        pass

    def state_dict(self):
        return {"path": __import__("pathlib").Path("x")}

    def load_state_dict(self, state):
        pass
