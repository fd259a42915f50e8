"""A compiled Keras model with chance in it, for digits."""

import keras

import penstock


def digits(schema, hidden: int = 32):
    model = keras.Sequential(
        [
            keras.Input((8, 8), name="image"),
            keras.layers.Flatten(),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(schema.num_classes, activation="softmax"),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.02, 60)
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def not_compiled(schema):
    return keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)])


def charted(schema):
    """With a loss of its own, which charts how many rows it sees. Not with TensorFlow, which calls it once, to trace it."""

    def loss(label, output):
        penstock.log("rows", len(output), reduce="sum")
        return keras.losses.sparse_categorical_crossentropy(label, output)

    model = digits(schema)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


class Noisy(keras.Model):
    """Has noise of Keras' own generator, a count with a private name, and a layer that it freezes at its sixth step."""

    def __init__(self):
        super().__init__()
        self._steps, self.flat, self.body = 0, keras.layers.Flatten(), keras.layers.Dense(16)
        self.head = keras.layers.Dense(10, activation="softmax")

    def call(self, image, training=False):
        if training:
            self._steps += 1
            image = image + 0.1 * keras.random.normal(keras.ops.shape(image))
        return self.head(self.body(self.flat(image)))

    def train_step(self, *args, **options):
        if int(self.optimizer.iterations) == 5:
            self.body.trainable = False
        return super().train_step(*args, **options)


def noisy(schema):
    model = Noisy()
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model


class Counting(keras.Model):
    """A subclass whose variables are made by its first batch, and whose count is not a variable."""

    def __init__(self):
        super().__init__()
        self.seen, self.flat, self.dense = 0, keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")

    def call(self, image, training=False):
        self.seen += int(training)
        return self.dense(self.flat(image))


def counting(schema):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = Counting()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def averaging(schema):
    model = digits(schema)
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "sparse_categorical_crossentropy")
    return model
