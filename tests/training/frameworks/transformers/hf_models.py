"""Hugging Face models for digits, built from a config, with dropout in them."""

from transformers import Trainer, TrainerCallback, ViTConfig, ViTForImageClassification

import penstock


def vision(schema, hidden_size: int = 32):
    """Sees one channel of 8 x 8 as 16 patches."""
    config = ViTConfig(
        hidden_size=hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=schema.num_classes,
        hidden_dropout_prob=0.1,
        initializer_range=0.2,
    )
    return ViTForImageClassification(config)


class Own(Trainer):
    def compute_loss(self, model, inputs, *more, **options):
        penstock.log("rows", len(inputs["labels"]), reduce="sum")
        return 2 * super().compute_loss(model, inputs, *more, **options)


class Vision:
    """The same as a class, whose rows are named otherwise than the model's arguments."""

    trainer = Own

    def __init__(self, hidden_size: int = 32):
        self.hidden_size = hidden_size

    def build_model(self, schema):
        return vision(schema, self.hidden_size)

    def inputs(self, batch):
        return {"pixel_values": batch["image"].unsqueeze(1)}


class CountingTrainer(Trainer):
    seen = 0

    def compute_loss(self, model, inputs, *more, **options):
        self.seen += model.training
        return super().compute_loss(model, inputs, *more, **options)


class Counts(Vision):
    trainer = CountingTrainer


class Lowers(TrainerCallback):
    """Lowers the decay of weights, by a count of its own."""

    def __init__(self):
        self.count = 0

    def on_step_end(self, args, state, control, optimizer=None, **others):
        self.count += 1
        optimizer.param_groups[0]["weight_decay"] = 0.1 / self.count


class LoweringTrainer(Trainer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.add_callback(Lowers())


class Lowered(Vision):
    """With state in a callback, and in the object that makes inputs."""

    trainer, calls = LoweringTrainer, 0

    def inputs(self, batch):
        self.calls += 1
        return super().inputs(batch)
