"""Functions for Ray's TensorflowTrainer, as its guides have them: they know nothing of penstock. Captured, never imported."""

import os
import pickle
import tempfile
import time

import ray.train


def save(state, metrics):
    """Worker 0 gives the folder."""
    if ray.train.get_context().get_world_rank() > 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "state.pickle"), "wb") as file:
            pickle.dump(state, file)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def restore():
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder, open(os.path.join(folder, "state.pickle"), "rb") as file:
        return pickle.load(file)


def by_fit(config):
    """Keras' own loop under the strategy, as in the guide on data loading; its third epoch waits for the file `until`."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(3)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
        state = restore()
        if state is not None:
            model.set_weights(state["weights"])
        model.compile(optimizer=tf.keras.optimizers.SGD(0.3), loss="mse", metrics=["mae"])
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(state["epoch"] if state else 0, config["epochs"]):
        while epoch == 2 and not os.path.exists(config.get("until", "/")):
            time.sleep(0.05)
        rows = shard.to_tf(feature_columns="x", label_columns="y", batch_size=config["batch_size"])
        found = model.fit(rows, verbose=0).history
        print("replicas", strategy.num_replicas_in_sync, "weight", round(float(model.get_weights()[0].item()), 6))
        save({"weights": model.get_weights(), "epoch": epoch + 1}, {"loss": found["loss"][0], "mae": found["mae"][0]})


def by_hand(config):
    """The same by a step of its own, without Keras."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    state = restore() or {"values": (0.0, 0.0), "epoch": 0}
    with strategy.scope():
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        weight, bias = (tf.Variable([value], aggregation=first) for value in state["values"])

    @tf.function
    def step(x, y):
        def on_replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x * weight + bias - y) ** 2)
            gradients = tape.gradient(loss, [weight, bias])
            gradients = tf.distribute.get_replica_context().all_reduce("mean", gradients)
            for variable, gradient in zip((weight, bias), gradients, strict=True):
                variable.assign_sub(0.3 * gradient)
            return loss

        return strategy.run(on_replica)

    shard = ray.train.get_dataset_shard("train")
    for epoch in range(state["epoch"], config["epochs"]):
        for batch in shard.iter_batches(batch_size=config["batch_size"], drop_last=True):
            loss = step(tf.constant(batch["x"]), tf.constant(batch["y"]))
        values = (float(weight.numpy()[0]), float(bias.numpy()[0]))
        print("replicas", strategy.num_replicas_in_sync, "values", *(round(value, 6) for value in values))
        save({"values": values, "epoch": epoch + 1}, {"loss": float(strategy.reduce("mean", loss, axis=None))})
