"""Plots of a pipeline: its ops over time, how critical they are, and the memory of its ranks."""

from typing import Any

import numpy as np

from .._misc import check_type, unit_of_seconds
from .._summary import GIB
from ..analysis import Criticality, SampledStep
from ..prediction import Memory
from ..schedule import SEND_RECV
from ._axes import ACCENT, DARK, LIGHT, MEDIUM, axes, finished, plain_numbers, whole_numbers


# For each kind of op, its name in the legend, a colour that also differs in grey, and a hatch.
_PHASES = {
    "F": ("forward", LIGHT, None),
    "B": ("backward", MEDIUM, None),
    "I": ("backward-input", MEDIUM, None),
    "W": ("backward-weight", "white", "////"),
    "FB": ("forward beside backward", MEDIUM, "...."),
}
_HEIGHT = 0.8
# Only the largest parts have a bar of their own; neighbouring bars differ in shade.
_STYLES = ((DARK, None), (MEDIUM, None), (LIGHT, None), (MEDIUM, "////"), (LIGHT, "...."))
_OTHERS = ("white", None)


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
        look = {"facecolor": color, "edgecolor": DARK, "linewidth": 0.3, "hatch": hatch}
        for rank in np.unique(ops["rank"][ops["phase"] == phase]):
            of_rank = (ops["phase"] == phase) & (ops["rank"] == rank)
            bars = np.stack(
                [ops["start_s"][of_rank], (ops["end_s"] - ops["start_s"])[of_rank]], axis=1
            )
            ax.broken_barh(bars, (rank - _HEIGHT / 2, _HEIGHT), label=label, **look)
            label = None  # The others of its kind are in the legend once.
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
    return finished(ax, f"time from the start of the step ({unit})", "pipeline rank", columns=4)


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
        phases = ", ".join(sorted({*ops["phase"][ops["microbatch"] >= 0].tolist()} - {SEND_RECV}))
        raise ValueError(f"No op has the phase {phase!r}; known are {phases}.")
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
    return finished(ax, "microbatch (number)", "stage (number)")


def memory(memory: Memory, *, ax: Any = None) -> Any:
    """Plots the memory of each pipeline rank by part, and what is usable of a device.

    **Arguments:**

    - `memory`: from `prism.memory`.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: pipeline ranks over GiB (2^30 bytes). Parts beyond the five largest are combined.

    **Raises:**

    `ImportError` without matplotlib.
    """
    check_type(memory, Memory, "memory", "use `prism.memory` to get one")
    ranks = len(memory.ranks)
    ax = axes(ax, (7.0, 1.6 + 0.24 * min(ranks, 32)))
    names = dict.fromkeys(name for rank in memory.ranks for name in rank.parts)
    size = {name: [rank.parts.get(name, 0.0) / GIB for rank in memory.ranks] for name in names}
    largest = sorted(names, key=lambda name: -sum(size[name]))
    shown = {name: np.array(size[name]) for name in largest[: len(_STYLES)]}
    if small := largest[len(_STYLES) :]:
        shown["others"] = np.sum([size[name] for name in small], axis=0)
    bottoms, places = np.zeros(ranks), np.arange(ranks)
    for (name, sizes), (color, hatch) in zip(shown.items(), (*_STYLES, _OTHERS), strict=False):
        look = {"color": color, "hatch": hatch, "edgecolor": DARK, "linewidth": 0.4}
        ax.barh(places, sizes, left=bottoms, height=0.8, label=name, **look)
        bottoms = bottoms + sizes
    usable, device = memory.usable_bytes / GIB, memory.device_bytes / GIB
    label = f"usable: {usable:.4g} of {device:.4g} GiB"
    ax.axvline(usable, color=ACCENT, linestyle="--", label=label)
    ax.set(xlim=(0, 1.05 * max(device, bottoms.max())), ylim=(ranks - 0.4, -0.6))
    plain_numbers(ax.xaxis)
    whole_numbers(ax.yaxis)
    return finished(ax, "memory (GiB)", "pipeline rank", columns=4)
