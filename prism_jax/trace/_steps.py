"""The steps of one rank on the clock of its device: each from the last kernel of the step before to
its own last kernel, by the order of launches.
"""

import dataclasses
import itertools as it

import numpy as np
from jaxtyping import Float, Int

from ._spans import BACKWARD, FORWARD, Kind, Spans
from ._trace import OPTIMIZER, RangeNames
from ._work import COMPUTES, TALKS, Work


# Leading steps that differ by more than this from the later ones are of a warm-up, and up to this
# share of all steps. A first step has as many kernels as the next, within this share; one with
# fewer than this share of the usual number is empty, as a mark may be where the recording ends.
_WARM_UP, _MOST_WARM_UP, _ALIKE, _EMPTY = 0.1, 1 / 3, 0.01, 0.1
NO_STEP = "The profile has no whole step; record one, or name its range by --names."
_FEWEST = 4  # Steps whose spread is known, and of which some may be of a warm-up.


@dataclasses.dataclass(frozen=True)
class Steps:
    """**Attributes:**

    - `number`: the numbers of the steps.
    - `start`, `end`: on the device, in nanoseconds.
    - `first`, `last`: what the host launches from `first` up to `last` belongs to a step.
    - `warm_up`: how many were left out because steps had not become steady.
    """

    number: Int[np.ndarray, " steps"]
    start: Int[np.ndarray, " steps"]
    end: Int[np.ndarray, " steps"]
    first: Int[np.ndarray, " steps"]
    last: Int[np.ndarray, " steps"]
    warm_up: int = 0

    def __len__(self) -> int:
        return len(self.number)

    @property
    def seconds(self) -> Float[np.ndarray, " steps"]:
        return (self.end - self.start) * 1e-9

    def of(self, times: Int[np.ndarray, " times"]) -> Int[np.ndarray, " times"]:
        """The place of the step to which what is launched at each time belongs, or -1."""
        place = np.searchsorted(self.first, times, "right") - 1
        return np.where((place >= 0) & (times < np.append(self.last, 0)[place]), place, -1)

    def of_kernels(self, work: Work) -> Int[np.ndarray, " kernels"]:
        """The same of kernels. What was launched before the recording is of no step."""
        place = self.of(work.launched)
        place[(work.activity != TALKS) & ~work.joined & work.joined.any()] = -1
        return place


def steps_of(spans: Spans, work: Work, names: RangeNames) -> Steps:
    """The steps of a rank. Ranges of the host bound them, or else optimizers; those of a step that
    `names` define hold a whole step, and other ranges last until the next begins.
    """
    marks = _marks(spans, names) or _between_optimizers(work)
    # Kernels whose launch is known are in order; on the main stream they also run in this order.
    ordered = work.main & (work.joined | ~work.joined.any())
    launched, begins = work.launched[ordered], work.start[ordered]
    ends = np.maximum.accumulate(work.end[ordered])
    unjoined = work.end[work.main & ~work.joined & work.joined.any()]
    rows, before = [], None
    bounds = np.searchsorted(launched, [mark[1:] for mark in marks] or np.zeros((0, 2), np.int64))
    fewest = max(1, _EMPTY * float(np.median(np.diff(bounds)))) if marks else 1
    for (number, first, last), (low, high) in zip(marks, bounds.tolist(), strict=True):
        if high - low < fewest:
            continue
        begin, end = int(begins[low:high].min()), int(work.end[ordered][low:high].max())
        # What was launched before, or before the recording.
        earlier = max(
            (int(x.max()) for x in (ends[:low], unjoined[unjoined <= begin]) if len(x)),
            default=-(2**62),
        )
        if not work.on_device:  # The host itself is what runs.
            begin, end = first, last
        elif before is None or before[0] + 1 != number or before[1] != first:
            # Without a step before it: as far behind the host as at its end.
            begin = max(min(earlier, begin), min(begin, first + end - last))
        else:
            begin = before[2]
        if end > begin:
            rows.append((number, begin, end, first, last))
        before = (number, last, end)
    table = np.array(rows, np.int64).reshape(-1, 5)
    seconds, warm_up = (table[:, 2] - table[:, 1]) * 1.0, 0
    while (
        len(seconds) - warm_up >= _FEWEST
        and warm_up < _MOST_WARM_UP * len(seconds)
        and _is_warm_up(seconds[warm_up:])
    ):
        warm_up += 1
    number, begin, end, first, last = table[warm_up:].T
    return Steps(number, begin, end, first, last, warm_up)


def whole_recording(work: Work) -> Steps:
    """All that was recorded, as one step."""
    bounds = (work.start.min(), work.end.max(), -(2**62), 2**62)
    number, begin, end, first, last = np.array([[0], *([bound] for bound in bounds)])
    return Steps(number, begin, end, first, last)


def _is_warm_up(seconds: Float[np.ndarray, " steps"]) -> bool:
    later = np.median(seconds[1:])
    usual = np.median(np.abs(seconds[1:] - later))
    return bool(abs(seconds[0] - later) > max(_WARM_UP * later, 4 * usual))


def _marks(spans: Spans, names: RangeNames) -> list[tuple[int, int, int]]:
    """The number, start and end of each step by its range."""
    numbers = names.steps_of(spans.names)
    is_mark = np.array([number is not None for number in numbers] or [False])
    chosen = spans[(spans.kind == Kind.RANGE) & is_mark[spans.name]]
    by_number: dict[int, tuple[int, int, int]] = {}
    columns = (chosen.name.tolist(), chosen.start.tolist(), chosen.end.tolist())
    for name, start, end in zip(*columns, strict=True):
        number = numbers[name] or 0
        by_number.setdefault(number, (number, start, end))
    marks = sorted(by_number.values(), key=lambda mark: mark[1])
    most = it.accumulate((number for number, *_ in marks), max)
    marks = [mark for mark, number in zip(marks, most, strict=True) if mark[0] == number]
    if names.step is not None:
        return marks
    if len(chosen) > 2 * len(by_number):  # Numbers that repeat count something within a step.
        return []
    nexts = [*marks[1:], (-1, 0, 0)][: len(marks)]
    lasts = [  # A pause that is longer than a step is not part of it.
        after if following == number + 1 and after - end < end - start else end
        for (number, start, end), (following, after, _) in zip(marks, nexts, strict=True)
    ]
    return [(number, start, last) for (number, start, _), last in zip(marks, lasts, strict=True)]


def _between_optimizers(work: Work) -> list[tuple[int, int, int]]:
    """From each optimizer to the next one after a forward and a backward; the first step begins
    with the first kernel if it has as many kernels as the next.
    """
    ranges = [r for r in work.ranges if r.op == OPTIMIZER]
    # What a graph runs has no phase.
    forward = work.launched[np.isin(work.phase, (-1, FORWARD)) & (work.activity == COMPUTES)]
    backward = work.launched[work.phase == BACKWARD]
    needed = [launched for launched in (forward, backward) if len(launched)]
    ends: list[int] = []
    for r in ranges:
        between = [np.searchsorted(x, [*ends[-1:], r.start]) for x in needed]
        if not ends or all(low < high for low, high in between):
            ends.append(r.end)
        else:
            ends[-1] = r.end
    if not ends:
        return []
    counts = np.diff(np.searchsorted(work.launched, [-(2**62), *ends]))
    marks = [(i + 1, a, b) for i, (a, b) in enumerate(it.pairwise(ends))]
    alike = len(counts) < 2 or abs(counts[0] - counts[1]) <= _ALIKE * counts[1]
    first = int(work.launched[0]) if len(work.launched) else ends[0]
    return [(0, min(first, ends[0]), ends[0])] * bool(alike) + marks
