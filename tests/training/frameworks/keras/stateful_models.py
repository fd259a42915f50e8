"""Keras models with state in many places: in variables that the model tracks, and in others. Each function makes one."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

LOSS = "sparse_categorical_crossentropy"


class Scaled(keras.Model):
    """One layer, whose input is multiplied by `scale()` in training."""

    def __init__(self):
        super().__init__()
        self.flat, self.dense = layers.Flatten(), layers.Dense(10, activation="softmax")

    def call(self, image, training=False):
        return self.dense(self.flat(image) * (self.scale() if training else 1.0))


def scaled(scale: Callable[[], Any], loss: Any = LOSS, **compiled: Any):
    model = Scaled()
    model.scale = scale
    model.compile(keras.optimizers.SGD(0.1), loss, **compiled)
    return model


def tracked(schema):
    """Layers, an optimizer and a weight with state of every kind."""
    image = keras.Input((8, 8), name="image")
    flipped = layers.RandomFlip("horizontal")(layers.Reshape((8, 8, 1))(image))
    normal = layers.SpectralNormalization(layers.Dense(6))(layers.Reshape((8, 8))(flipped))
    found = layers.BatchNormalization()(layers.GRU(6, recurrent_dropout=0.2)(normal))
    model = keras.Model(image, layers.Dense(10, activation="softmax")(layers.GaussianNoise(0.1)(found)))
    adam = keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2)
    model.compile(keras.optimizers.LossScaleOptimizer(adam, dynamic_growth_steps=2), LOSS)
    return model


def learns_by(schema, optimizer, **options):
    """Two layers, as some optimizers treat matrices of hidden layers apart."""
    middle = [layers.Flatten(), layers.Dense(8, activation="tanh")]
    model = keras.Sequential([keras.Input((8, 8)), *middle, layers.Dense(10, activation="softmax")])
    model.compile(getattr(keras.optimizers, optimizer)(0.02, **options), LOSS)
    return model


def numpy_traced(schema):
    return scaled(lambda: float(np.random.uniform(0.5, 1.5)))


def numpy_eager(schema):
    return scaled(lambda: float(np.random.uniform(0.5, 1.5)), run_eagerly=True)


def closure(schema):
    draws = np.random.default_rng(1)
    return scaled(lambda: float(draws.uniform(0.5, 1.5)), run_eagerly=True)


def loss_closure(schema):
    draws = np.random.default_rng(1)

    def loss(label, output):
        return keras.losses.sparse_categorical_crossentropy(label, output) * float(draws.uniform(0.5, 1.5))

    return scaled(lambda: 1.0, [loss], run_eagerly=True)


def seeds(schema):
    generator = keras.random.SeedGenerator(1)
    return scaled(lambda: keras.random.uniform((), 0.5, 1.5, seed=generator))


class Faster(Scaled):
    """Its layer learns by an optimizer that it is not compiled with."""

    def compile(self, *args, **options):
        super().compile(*args, **options)
        self.own = keras.optimizers.SGD(0.1, momentum=0.9)

    def train_step(self, data):
        weights = self.trainable_variables
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
            self.own.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}
        import torch

        loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
        with torch.no_grad():
            self.own.apply(torch.autograd.grad(loss, [each.value for each in weights]), weights)
        return {"loss": loss}


def second_optimizer(schema):
    model = Faster()
    model.scale = lambda: 1.0
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    return model


class Means(layers.Layer):
    """Multiplies what a torch module gives by the means in its buffers."""

    def __init__(self):
        super().__init__()
        import torch

        self.module = torch.nn.BatchNorm1d(64)

    def call(self, image, training=False):
        return self.module(image, training=training) * self.module.module.running_mean


def torch_module(schema):
    middle = [layers.Flatten(), Means()]
    model = keras.Sequential([keras.Input((8, 8)), *middle, layers.Dense(10, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    return model


def tf_variable(schema):
    import tensorflow as tf

    count = tf.Variable(1.0, trainable=False)
    return scaled(lambda: 1.0 / count.assign_add(1.0))


def tf_random(schema):
    import tensorflow as tf

    return scaled(lambda: tf.random.uniform((), 0.5, 1.5))
