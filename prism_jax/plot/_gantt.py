from typing import Any

import numpy as np

from .._misc import check_type, unit_of_seconds
from ..analysis import SampledStep
from ..schedule import SEND_RECV
from ._axes import (
    ACCENT,
    DARK,
    LIGHT,
    MEDIUM,
    axes,
    finished,
    legend_above,
    plain_numbers,
    whole_numbers,
)


# For each kind of op, its name in the legend, a colour that also differs in grey, and a hatch.
_PHASES = {
    "F": ("forward", LIGHT, None),
    "B": ("backward", MEDIUM, None),
    "I": ("backward-input", MEDIUM, None),
    "W": ("backward-weight", "white", "////"),
    "FB": ("forward beside backward", MEDIUM, "...."),
}
_HEIGHT = 0.8


def gantt(step: SampledStep, *, ax: Any = None) -> Any:
    """Plots one simulated step: the ops of each pipeline rank over time, and the critical path.

    **Arguments:**

    - `step`: from `prism.sample_step`.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: pipeline ranks over time. The critical path is a line, which goes from one rank to
    another where it follows a send_recv.

    **Raises:**

    `ValueError` for what is not a step; `ImportError` without matplotlib.
    """
    check_type(step, SampledStep, "simulated step", "use `sample_step` to get one")
    ax = axes(ax, (9.0, 1.4 + 0.28 * min(step.num_ranks, 32)))
    from matplotlib.patheffects import withStroke

    per_second, unit = unit_of_seconds([step.step_s])
    ops = {name: x * per_second if name.endswith("_s") else x for name, x in step.ops.items()}
    for phase, (label, color, hatch) in _PHASES.items():
        _bars(ax, ops, ops["phase"] == phase, label, color, hatch)
    reduction = step.reduction_s * per_second
    for rank, (start, end) in enumerate(reduction):
        if end - start > 1e-6 * step.step_s * per_second:
            bar = [(start, end - start)]
            ax.broken_barh(bar, (rank - _HEIGHT / 2, _HEIGHT), facecolor=DARK, linewidth=0)
    times, ranks = critical_line(step)
    (line,) = ax.plot(times * per_second, ranks, color=ACCENT, linewidth=1.8, label="critical path")
    line.set_path_effects([withStroke(linewidth=4, foreground="white")])
    end, barrier = step.step_s * per_second, step.barrier_s * per_second
    if end > barrier:
        ax.axvspan(barrier, end, color="0.85", zorder=0, label="after the barrier")
    plain_numbers(ax.xaxis)
    ax.set(xlim=(0, 1.005 * end), ylim=(step.num_ranks - 0.4, -0.6))
    whole_numbers(ax.yaxis)
    finished(
        ax, xlabel=f"time from the start of the step ({unit})", ylabel="pipeline rank", legend=False
    )
    legend_above(ax, 4)
    return ax


def _bars(ax, ops, chosen, label, color, hatch) -> None:
    for rank in np.unique(ops["rank"][chosen]):
        mine = chosen & (ops["rank"] == rank)
        start, end = ops["start_s"][mine], ops["end_s"][mine]
        ax.broken_barh(
            np.stack([start, end - start], axis=1),
            (rank - _HEIGHT / 2, _HEIGHT),
            facecolor=color,
            edgecolor=DARK,
            linewidth=0.3,
            hatch=hatch,
            label=label,
        )
        label = None


def critical_line(step: SampledStep) -> tuple[np.ndarray, np.ndarray]:
    """The critical path as points: times in seconds, and the rank at each time."""
    ops, times, ranks = step.ops, [], []
    for op in step.path.tolist():
        rank, receiver = ops["rank"][op], step.receivers[op]
        to = ops["rank"][receiver] if ops["phase"][op] == SEND_RECV and receiver >= 0 else rank
        times += [ops["start_s"][op], ops["end_s"][op]]
        ranks += [rank, to]
    times += [step.barrier_s, step.step_s]
    return np.array(times), np.array([*ranks, step.last_rank, step.last_rank])
