"""What nccl-tests print, as a link and its efficiencies by size."""

import dataclasses
import re

import numpy as np
from jaxtyping import Float


# The names of the programs, and of the collectives here.
_PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
_SMALL = 0.1  # The most that transfer may be of the time of a size that shows the latency.
# Bytes, count, type, operation, root, and, out of place, microseconds and the two bandwidths.
_NUMBER = r"\s+(\d+(?:\.\d+)?)"
_ROW = re.compile(rf"\s*(\d{{1,18}})\s+\d+\s+\S+\s+(\S+)\s+-?\d+{3 * _NUMBER}\s")


@dataclasses.dataclass(frozen=True)
class NcclTest:
    """A measured collective, as over one link that joins all its GPUs.

    **Attributes:**

    - `kernel`: the collective.
    - `gpus`: how many GPUs took part.
    - `bytes`, `seconds`: the size of the whole buffer, and the time of a call, `(sizes,)` each.
    - `bandwidth_bytes_per_s`: of the link: the largest bus bandwidth.
    - `latency_s`: of a hop of a ring, by the smallest size; zero if that is not small.
    - `efficiency`: the share of the bandwidth at each size beyond the hops, `(sizes,)`.
    """

    kernel: str
    gpus: int
    bytes: Float[np.ndarray, " sizes"]
    seconds: Float[np.ndarray, " sizes"]
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: Float[np.ndarray, " sizes"]


def nccl_test_of(text: str, name: str = "") -> NcclTest:
    """The measured collective of an output of nccl-tests.

    **Arguments:**

    - `text`: what the program printed.
    - `name`: of the file; names the collective where the text does not.

    **Raises:**

    A `ValueError` of one sentence if there are no rows, or it is not clear of what.
    """
    rows = [match.groups() for match in map(_ROW.match, text.splitlines()) if match]
    if not rows:
        raise ValueError("it has no rows of nccl-tests, such as `all_reduce_perf` prints")
    of_size = {int(row[0]): row for row in rows if all(float(cell) > 0 for cell in row[2:])}
    rows = [of_size[size] for size in sorted(of_size) if size]
    if not rows:
        raise ValueError("none of its rows has a size and a time")
    sizes, seconds, algorithm, bus = (
        np.array([float(row[i]) for row in rows]) * unit
        for i, unit in ((0, 1.0), (2, 1e-6), (3, 1e9), (4, 1e9))
    )
    # What the bus carries over what is asked for, from the largest size, which is rounded least.
    ratio = float(bus[-1] / algorithm[-1])
    kernel = _kernel(f"{name} {text}", rows[0][1], ratio)
    passes = 2 if kernel == "all_reduce" else 1
    ranks = len(re.findall(r"^#\s+Rank\s+\d+", text, re.MULTILINE))
    gpus = ranks or (2 if kernel == "send_recv" else round(1 / (1 - min(ratio / passes, 0.9999))))
    moved = ratio * sizes
    bandwidth, hops = float(bus.max()), passes * max(gpus - 1, 1)
    # What a size takes that is too small for its bytes to matter; without one, the efficiencies
    # hold the latency, too.
    transfer = float(moved[0] / bandwidth / seconds[0])
    latency = float(seconds[0]) * (1 - transfer) / hops if transfer < _SMALL else 0.0
    efficiency = moved / np.maximum(seconds - hops * latency, 1e-9) / bandwidth
    return NcclTest(kernel, gpus, sizes, seconds, bandwidth, latency, efficiency)


def _kernel(text: str, operation: str, ratio: float) -> str:
    """The collective, by the name of the program, or else by what its rows say."""
    for program, kernel in _PROGRAMS.items():
        if f"{program}_perf" in text:
            return kernel
    if operation not in ("none", "N/A"):
        return "all_reduce" if ratio > 1 else "reduce_scatter"
    raise ValueError(
        "it does not say which collective it is of; name the file by the program, such as "
        "`all_gather_perf.txt`"
    )
