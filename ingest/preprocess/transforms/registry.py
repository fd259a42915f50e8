"""Which transforms are there? Those of penstock, and those that installed packages add (entry points `penstock.transforms`)."""

from __future__ import annotations

from typing import Any

from penstock.ingest.preprocess.transforms.transform import Transform
from penstock.plugins import Plugins

__all__ = ["TRANSFORMS"]

_HERE = "penstock.ingest.preprocess.transforms"

TRANSFORMS: Plugins[type[Transform[Any]]] = Plugins(
    "transform",
    "penstock.transforms",
    {
        "standard_scaler": f"{_HERE}.scalers:StandardScaler",
        "min_max_scaler": f"{_HERE}.scalers:MinMaxScaler",
        "max_abs_scaler": f"{_HERE}.scalers:MaxAbsScaler",
        "robust_scaler": f"{_HERE}.scalers:RobustScaler",
        "imputer": f"{_HERE}.missing:Imputer",
        "one_hot": f"{_HERE}.encoders:OneHot",
        "ordinal": f"{_HERE}.encoders:Ordinal",
        "label_encoder": f"{_HERE}.encoders:LabelEncoder",
        "concatenator": f"{_HERE}.concatenator:Concatenator",
        "cast": f"{_HERE}.columns:Cast",
        "rename": f"{_HERE}.columns:Rename",
        "flatten": f"{_HERE}.extra.flatten:Flatten",
        "drop": f"{_HERE}.columns:Drop",
        "decode_image": f"{_HERE}.decode_image:DecodeImage",
        "ragged": f"{_HERE}.ragged:Ragged",
        "map_batches": f"{_HERE}.map_batches:MapBatches",
        "map": f"{_HERE}.extra.map_rows:Map",
        "flat_map": f"{_HERE}.extra.map_rows:FlatMap",
        "filter": f"{_HERE}.extra.map_rows:Filter",
    },
    needs=("Options", "apply", "description"),
)
"""By the name that a pipeline file uses; the order is that of the reference."""
