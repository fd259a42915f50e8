"""Recipes whose state or gradients lie where a checkpoint may miss them. Captured as user code, never imported by the tests."""

import collections
import itertools

import numpy as np
import torch
from torch import nn

STEPS = 0
RANDOM = np.random.default_rng(3)


class Head:
    """A body that no optimizer has, and a head."""

    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, schema.num_classes))

    def optimizer(self, model):
        return torch.optim.SGD(model[3].parameters(), lr=0.5)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"])

    def predict(self, model, batch):
        return model(batch["image"])


class FrozenNorm(Head):
    """A frozen body in eval mode, and a pretrained one in eval mode that is learned."""

    def build_model(self, schema):
        frozen = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)).eval().requires_grad_(False)
        return nn.Sequential(frozen, nn.BatchNorm1d(64).eval(), nn.Identity(), nn.Linear(64, schema.num_classes))


class Count(Head):
    """Counts its steps on itself, and on a module."""

    def __init__(self, on="recipe"):
        self.on, self.steps, self.notes = on, 0, []

    def loss(self, model, batch):
        if model.training and self.on == "recipe":
            self.steps += 1
        if model.training and self.on == "thaw" and torch.is_grad_enabled():
            model[1].weight.requires_grad_(False)
            self.notes.append("frozen")
        return super().loss(model, batch)


class _Count:
    def __init__(self):
        self.steps = 0

    def next(self):
        self.steps += 1
        return self.steps


class Hidden(Head):
    """Scales its loss by what no checkpoint holds: a count of steps, or a random number."""

    steps = 0

    def __init__(self, where):
        self.where, self.count, self.ready = where, _Count(), False
        self.queue, self.array = collections.deque(maxlen=99), np.zeros(1)
        self.places = itertools.count(1) if where == "iterator" else None

    def state(self):
        global STEPS
        if self.where == "global":
            STEPS += 1
            return STEPS
        if self.where == "class":
            Hidden.steps += 1
            return Hidden.steps
        if self.where == "queue":
            self.queue.append(1)
            return len(self.queue)
        if self.where == "array":
            self.array += 1
            return float(self.array[0])
        if self.where == "flag":  # of a first batch, as in a data-dependent initialization
            first, self.ready = not self.ready, True
            return 1 if first else 9
        if self.where == "object":
            return self.count.next()
        return next(self.places) if self.where == "iterator" else 20 * RANDOM.random()

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss * min(1.0, self.state() / 20) if model.training else loss


class _Slows(torch.optim.SGD):
    """Makes its steps smaller, by a count of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.5)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= self.count
        return super().step(closure)


class Slows(Head):
    def optimizer(self, model):
        return _Slows(model[3].parameters())


class Lowers:
    """A callback that lowers the learning rate, by a count of its own."""

    def __init__(self):
        self.count = 0

    def step(self, training):
        self.count += 1
        training.optimizer.param_groups[0]["lr"] = 0.5 / self.count


class AddsUp(Head):
    """Steps its optimizer every second time."""

    def __init__(self):
        self.turn = torch.zeros(())  # in place, so that its value is what changes

    def training_step(self, model, batch, optimizer):
        loss = self.loss(model, batch)
        loss.backward()
        self.turn += 1
        if self.turn % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class _Center(nn.Module):
    """A buffer that forward() assigns anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(64))

    def forward(self, image):
        image = image.flatten(1)
        if self.training:
            self.center = 0.9 * self.center + 0.1 * image.mean(0)
        return image - self.center


class Center(Head):
    def build_model(self, schema):
        return nn.Sequential(_Center(), nn.Linear(64, schema.num_classes))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def training_step(self, model, batch, optimizer):
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss


class _Scale(nn.Module):
    """Has a factor in its extra state alone."""

    def __init__(self):
        super().__init__()
        self.seen = {"rows": 0}

    def forward(self, image):
        if self.training:
            self.seen = {"rows": self.seen["rows"] + len(image)}
        return image * (1 + self.seen["rows"] / 1000)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


class Extra(Head):
    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), _Scale(), nn.Identity(), nn.Linear(64, schema.num_classes))


class _Grows(nn.Module):
    """Makes a buffer in a later call, or resizes one."""

    def __init__(self, after):
        super().__init__()
        self.after, self.calls = after, 0
        self.register_buffer("bank", torch.zeros(0))

    def forward(self, image):
        self.calls += 1
        if self.calls == self.after:
            self.register_buffer("scale", torch.ones(()))
            self.bank = torch.zeros(self.calls)
        return image.flatten(1)


class Grows(Head):
    def __init__(self, after=1):
        self.after = after

    def build_model(self, schema):
        return nn.Sequential(_Grows(self.after), nn.LazyBatchNorm1d(), nn.Identity(), nn.Linear(64, schema.num_classes))


class Half(Head):
    """Weights in bfloat16."""

    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, schema.num_classes, bias=False)).to(torch.bfloat16)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-9)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["image"].to(torch.bfloat16)).float(), batch["label"])

    def predict(self, model, batch):
        return model(batch["image"].to(torch.bfloat16)).float()


class Normed(Head):
    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Identity(), nn.Linear(64, schema.num_classes))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)


class Device(Head):
    """Fails as a GPU does."""

    def __init__(self, kind="memory"):
        self.kind = kind

    def loss(self, model, batch):
        if self.kind == "memory":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1.0 GiB free. Process 7 has 3"
            )
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported")


class Drops(Head):
    """Its weights depend on torch's random numbers."""

    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Identity(), nn.Linear(64, schema.num_classes))


class Draws:
    """A callback that draws random numbers where it is called at a start, a checkpoint and a look at numbers."""

    def start(self, training):
        torch.rand(1), np.random.rand()

    def checkpoint(self, training):
        torch.rand(1)

    def logged(self, training, step, values):
        torch.rand(1)


class Fused(Head):
    """A fused optimizer, which takes the strides of its state for those of its weights."""

    def build_model(self, schema):
        layers = [nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(128, schema.num_classes)).to(memory_format=torch.channels_last)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


class _Nested(torch.optim.Optimizer):
    """Has float32 averages of bfloat16 weights in a list in a dict."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            start = {"means": [torch.zeros_like(parameter, dtype=torch.float32)]}
            (mean,) = self.state[parameter].setdefault("kept", start)["means"]
            mean.mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
            parameter.sub_((0.05 * mean).to(parameter.dtype))


class Nested(Head):
    def build_model(self, schema):
        return super().build_model(schema).to(torch.bfloat16)

    def optimizer(self, model):
        return _Nested(model.parameters())

    def predict(self, model, batch):
        return model(batch["image"].to(torch.bfloat16)).float()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(self.predict(model, batch), batch["label"])


class _Temperature(nn.Module):
    """A parameter that is called as the files of torch end."""

    def __init__(self):
        super().__init__()
        self.pt = nn.Parameter(torch.ones(()))

    def forward(self, scores):
        return scores * self.pt


class NamedPt(Head):
    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), _Temperature(), nn.Identity(), nn.Linear(64, schema.num_classes))


class Cosine(Head):
    """A schedule that computes with numpy, so that the optimizer's state gets its numbers."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3 if step < 3 else np.cos(step / 20))


class _Seen(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = [1, np.float32(2)]


class Seen(Head):
    """Its optimizer's state gets a number that torch loads only as code."""

    def optimizer(self, model):
        return _Seen(model.parameters(), lr=0.1)


class Outside(Head):
    """Its loss has weights of its own."""

    def build_model(self, schema):
        self.criterion = nn.Linear(32, schema.num_classes)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32))

    def optimizer(self, model):
        return torch.optim.SGD([*model.parameters(), *self.criterion.parameters()], lr=0.05)


class Decay(Head):
    def __init__(self, decay=0.0):
        self.decay = decay

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=self.decay)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Halves:
    """A callback that halves the learning rate once."""

    def step(self, training):
        if training.steps == 2:
            training.optimizer.param_groups[0]["lr"] /= 2
