"""How does a compiled Keras model train in one worker?"""

from __future__ import annotations

from penstock.errors import SpecError
from penstock.training.frameworks.keras.library import TENSORFLOW, backend, choose_backend
from penstock.training.frameworks.keras.loading import WEIGHTS, WHOLE
from penstock.training.frameworks.loops.own_loop import OwnLoop, refuse_unread
from penstock.training.model import Predicts, UsualPredicts
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["KERAS", "KerasFramework"]

_UNREAD = {
    "learning_rate": "the optimizer that the model is compiled with has one",
    "clip_norm": "the optimizer has global_clipnorm",
    "accumulate": "the optimizer has gradient_accumulation_steps",
    "precision": "call keras.config.set_dtype_policy where the model is built",
    "compile": "compile(jit_compile=True) does it",
    "callbacks": "schedules are the optimizer's; the best checkpoint is train.checkpoint.best",
    "last_batch": "the last batch of an epoch is kept",
}
"""Field that is not read -> the way to do it here."""


class KerasFramework(OwnLoop):
    """See `penstock.training.frameworks.framework.Framework`."""

    extra = "keras"
    loader = "penstock.training.frameworks.keras.loading:load"
    model_files = (WEIGHTS, WHOLE)
    fit = "penstock.training.frameworks.keras.loop:fit"
    on_cpus = True

    @property
    def needs(self) -> tuple[str | tuple[str, ...], ...]:  # type: ignore[override]
        """Keras and its backend."""
        return ("keras", TENSORFLOW if backend() == "tensorflow" else backend())

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import the function; refuse settings that only penstock's own loop reads, and more than one worker."""
        refuse_unread(spec, _UNREAD)
        _ = self.libraries
        if spec.workers > 1:
            raise SpecError(
                f"train.workers: {spec.workers} with train.framework: keras, which trains in one worker: "
                "Keras 3 does not learn under tf.distribute.MultiWorkerMirroredStrategy",
                next_step="set train.workers: 1 and raise train.cpus_per_worker, or write a function for Ray Train with "
                "Keras 2 (train.loop: docs/ray-train.md)",
            )
        if spec.gpus not in ("auto", 0):
            raise SpecError(
                f"train.gpus: {spec.gpus} with train.framework: keras, which trains on CPUs here", next_step="set 0"
            )
        choose_backend()
        function = code.load()
        if isinstance(function, type) or not callable(function):
            raise SpecError(f"train.recipe: {code.target} is not a function (schema, **params) that returns a compiled model")
        return UsualPredicts()


KERAS = KerasFramework()
