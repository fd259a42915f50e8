"""How does MLflow load a registered model and predict with it?

MLflow imports this module when it loads the model ("models from code"), from the copy of our modules that lies in the model
itself. So an environment with the listed requirements is enough; penstock need not be installed there. A package that adds a
format, a transform or a framework must be, and is listed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext

from penstock.errors import PenstockError
from penstock.training.registry.loaded_model import LoadedModel

__all__ = ["ServedModel"]


class ServedModel(PythonModel):  # type: ignore[misc]
    """`penstock.training.registry.loaded_model.LoadedModel` behind MLflow's interface."""

    def load_context(self, context: PythonModelContext) -> None:
        """Rebuild the model from the artifact `spec`, `model.json`, and the files beside it. Raises as `LoadedModel`."""
        self.model = LoadedModel(Path(context.artifacts["spec"]).parent)

    def predict(
        self, context: PythonModelContext | None, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> Any:
        """Predict from raw rows.

        Args:
            context: not used.
            model_input: as `rows` of `LoadedModel.predict`; MLflow makes a DataFrame of whatever it is given.
            params: `on_error`, as of `LoadedModel.predict`.

        Raises:
            MlflowException: for every error of `LoadedModel.predict`, since MLflow's server hides the text of others.
        """
        try:
            found = self.model.predict(model_input, **(params or {}))
        except PenstockError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        for name in found.columns:
            if found[name].hasnans or found[name].dtype == object:
                found[name] = pd.Series([_without_nan(value) for value in found[name]], found.index, object)
        return found


def _without_nan(value: Any) -> Any:
    """Put None in the place of NaN, which is not JSON, also in lists."""
    return [*map(_without_nan, value)] if isinstance(value, list) else None if value is pd.NA or value != value else value
