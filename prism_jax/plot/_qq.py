from typing import Any

import numpy as np

from .._misc import check_type
from ..law import Law
from ._axes import ACCENT, DARK, axes, finished, measured_steps, plain_numbers


def qq(law: Law, measured: Any, *, ax: Any = None) -> Any:
    """Plots the quantiles of measured steps over those of a law. They are on the diagonal if both
    agree, parallel to it if only the level differs, and steeper if measured steps spread more.

    **Arguments:**

    - `law`: from `simulate`.
    - `measured`: measured step times, in seconds, at least one.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes, both in seconds. The i-th of n steps in ascending order is plotted at the level
    `(i - 1/2) / n`.

    **Raises:**

    `ValueError` for measured steps that are not positive numbers; `ImportError` without matplotlib.
    """
    check_type(law, Law, "law", "use `simulate` to get one")
    ax = axes(ax, (4.2, 4.2))
    steps = np.sort(measured_steps(measured))
    levels = (np.arange(len(steps)) + 0.5) / len(steps)
    predicted = np.asarray(law.quantile(levels))
    low, high = min(steps[0], predicted[0]), max(steps[-1], predicted[-1])
    ax.plot([low, high], [low, high], color=DARK, linewidth=1, label="agreement")
    label = f"{len(steps):,} measured steps"
    ax.plot(predicted, steps, "o", color=ACCENT, markersize=3.5, fillstyle="none", label=label)
    for axis in (ax.xaxis, ax.yaxis):
        plain_numbers(axis)
        axis.get_major_locator().set_params(nbins=4)
    ax.set_aspect("equal", adjustable="datalim")
    return finished(ax, xlabel="predicted step time (s)", ylabel="measured step time (s)")
