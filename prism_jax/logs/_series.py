"""What is known of a series of measured values before it is one of step times."""

import dataclasses
import functools as ft
import pathlib
import tomllib
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int


UNITS = ("s", "ms", "steps/s", "tokens/s", "tokens/s/GPU", "samples/s", "samples/s/GPU")


@dataclasses.dataclass(frozen=True)
class Series:
    """Values in the order in which they were written.

    **Attributes:**

    - `values`: in `unit`, `(values,)`.
    - `steps`: the number of the step of each, `(values,)`; of a restarted run it goes back.
    - `unit`: one of `UNITS`.
    - `source`: the framework that wrote them, or the name of their column.
    - `pauses`: by its kind, whether a pause was written before each value, `(values,)` each.
    - `restarts`: whether another run begins with each value, `(values,)`; `None` if none does.
    - `smoothed`: whether a value depends on those before it, so that only their level is known.
    """

    values: Float[np.ndarray, " values"]
    steps: Int[np.ndarray, " values"]
    unit: str
    source: str
    pauses: dict[str, Bool[np.ndarray, " values"]] = dataclasses.field(default_factory=dict)
    restarts: Bool[np.ndarray, " values"] | None = None
    smoothed: bool = False


@ft.cache
def known() -> dict[str, Any]:
    """The tables of `known.toml`."""
    text = pathlib.Path(__file__).with_name("known.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
