from typing import Any

import numpy as np

from .._misc import check_type
from ..prediction import Memory
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


# Only the largest parts have a bar of their own; neighbouring bars differ in shade.
_STYLES = ((DARK, None), (MEDIUM, None), (LIGHT, None), (MEDIUM, "////"), (LIGHT, "...."))
_OTHERS = ("white", None)


def memory(memory: Memory, *, ax: Any = None) -> Any:
    """Plots the memory of each pipeline rank by part, and the memory of a device.

    **Arguments:**

    - `memory`: from `prism.memory`.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: pipeline ranks over gigabytes (1e9 bytes). Parts beyond the five largest are combined.

    **Raises:**

    `ImportError` without matplotlib.
    """
    check_type(memory, Memory, "memory", "use `prism.memory` to get one")
    ranks = len(memory.ranks)
    ax = axes(ax, (7.0, 1.6 + 0.24 * min(ranks, 32)))
    names = dict.fromkeys(name for rank in memory.ranks for name in rank.parts)
    size = {name: [rank.parts.get(name, 0.0) / 1e9 for rank in memory.ranks] for name in names}
    largest = sorted(names, key=lambda name: -sum(size[name]))
    shown = {name: np.array(size[name]) for name in largest[: len(_STYLES)]}
    if rest := largest[len(_STYLES) :]:
        shown["others"] = np.sum([size[name] for name in rest], axis=0)
    left, places = np.zeros(ranks), np.arange(ranks)
    for (name, gigabytes), (color, hatch) in zip(shown.items(), (*_STYLES, _OTHERS), strict=False):
        look = {"color": color, "hatch": hatch, "edgecolor": DARK, "linewidth": 0.4}
        ax.barh(places, gigabytes, left=left, height=0.8, label=name, **look)
        left = left + gigabytes
    device = memory.device_bytes / 1e9
    ax.axvline(device, color=ACCENT, linestyle="--", label=f"device: {device:.4g} GB")
    ax.set(xlim=(0, 1.05 * max(device, left.max())), ylim=(ranks - 0.4, -0.6))
    plain_numbers(ax.xaxis)
    whole_numbers(ax.yaxis)
    legend_above(ax, 4)
    return finished(ax, xlabel="memory (GB)", ylabel="pipeline rank", legend=False)
