from typing import Any

import numpy as np

from ..analysis import Criticality
from ..schedule import SEND_RECV
from ._axes import axes, finished, whole_numbers


def heat_map(criticality: Criticality, *, phase: str | None = None, ax: Any = None) -> Any:
    """Plots the probability that the compute of each stage and microbatch is on the critical path.

    **Arguments:**

    - `criticality`: from `prism.criticality`.
    - `phase`: `F`, `B`, `I` or `W` for the ops of one phase; by default the mean over all phases,
        weighted by the mean latency of ops.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: stages over microbatches. Darker cells are more probable; white cells have no such op.

    **Raises:**

    `ValueError` if no op has this phase; `ImportError` without matplotlib.
    """
    ops = criticality.ops
    chosen = ops["phase"] != SEND_RECV if phase is None else ops["phase"] == phase
    chosen &= ops["microbatch"] >= 0  # Without the ops that run once in a step.
    if not chosen.any():
        known = ", ".join(sorted({*ops["phase"][ops["microbatch"] >= 0].tolist()} - {SEND_RECV}))
        raise ValueError(f"No op has the phase {phase!r}; known are {known}.")
    ax = axes(ax, (7.0, 3.0))
    stage, microbatch = ops["stage"][chosen], ops["microbatch"][chosen]
    shape = (int(stage.max()) + 1, int(microbatch.max()) + 1)
    weight, total = np.zeros(shape), np.zeros(shape)
    np.add.at(weight, (stage, microbatch), ops["latency_s"][chosen])
    np.add.at(total, (stage, microbatch), (ops["latency_s"] * ops["probability"])[chosen])
    values = np.ma.masked_array(total / np.where(weight > 0, weight, 1), weight <= 0)
    image = ax.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="probability of being critical")
    for axis in (ax.xaxis, ax.yaxis):
        whole_numbers(axis)
    return finished(ax, xlabel="microbatch (number)", ylabel="stage (number)", legend=False)
