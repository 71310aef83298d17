"""Finds sends and receives that take far longer than others, such as those between nodes."""

import dataclasses

import msgspec
import numpy as np
from jaxtyping import Float

from ..data import Outline
from ..program import StepGraph
from ..schedule import SEND_RECV


# The fewest links of a class, because fewer may be those of one slow worker; the least ratio of the
# means; and the least share of the variance that two classes must explain. With a normal law, which
# is one class, the best threshold explains 0.64.
_FEWEST, _LEAST, _EXPLAINED = 2, 2.0, 0.8


@dataclasses.dataclass(frozen=True)
class Classes:
    """Values in two classes.

    **Attributes:**

    - `threshold`: the value between the classes.
    - `means`: the geometric means of the lower and the upper class.
    - `explained`: the share of the variance of logarithms that is between the classes.
    """

    threshold: float
    means: tuple[float, float]
    explained: float


def two_classes(values: Float[np.ndarray, " values"]) -> Classes | None:
    """The threshold with the most variance between the classes, of logarithms (Otsu, "A threshold
    selection method from gray-level histograms", 1979). `None` if all values are equal.
    """
    logs = np.sort(np.log(values))
    total = float(np.sum((logs - logs.mean()) ** 2))
    if len(logs) < 2 or total <= 1e-12 * len(logs):
        return None
    low = np.arange(1, len(logs))
    sums = np.cumsum(logs)[:-1]
    means = sums / low, (logs.sum() - sums) / (len(logs) - low)
    between = low * (len(logs) - low) / len(logs) * (means[1] - means[0]) ** 2
    best = int(np.argmax(between))
    threshold = np.exp((logs[best] + logs[best + 1]) / 2)
    found = tuple(float(np.exp(mean[best])) for mean in means)
    return Classes(float(threshold), found, float(between[best]) / total)  # pyright: ignore


def with_links(
    outline: Outline, step: StepGraph, latencies: Float[np.ndarray, "ops steps"]
) -> Outline:
    """The outline with the pairs of workers whose sends and receives are in the slow class, if
    there are two classes. The median over both directions of a link counts.
    """
    links: dict[tuple[int, ...], list[np.ndarray]] = {}
    for op in np.flatnonzero(step.graph.phase == SEND_RECV).tolist():
        if not step.twin[op]:
            links.setdefault(tuple(sorted(step.members[op])), []).append(latencies[op])
    medians = {pair: float(np.median(parts)) for pair, parts in links.items()}
    if not medians or min(medians.values()) <= 0:
        return outline
    found = two_classes(np.array(list(medians.values())))
    if found is None or found.explained < _EXPLAINED:
        return outline
    slow = tuple(sorted(pair for pair, median in medians.items() if median > found.threshold))
    fewest = min(len(slow), len(medians) - len(slow))
    if fewest < _FEWEST or found.means[1] < _LEAST * found.means[0]:
        return outline
    return msgspec.structs.replace(outline, slow_links=slow)
