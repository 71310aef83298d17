"""Mean latencies of compute kernels: a roofline with efficiencies that depend on size."""

from ..data import Device, Kernels
from ._power import clock_factor


def compute_latency(
    kind: str,
    dtype: str,
    flop: float,
    num_bytes: float,
    device: Device,
    kernels: Kernels,
    parts: int = 1,
) -> float:
    """The latency of a compute kernel, in seconds.

    **Arguments:**

    - `kind`: `gemm`, `convolution` or `attention`, which compute in `dtype`; all other kinds only
        move bytes.
    - `dtype`: a key of the device's `peak_flop_per_s`.
    - `flop`: floating-point operations.
    - `num_bytes`: the bytes read and written.
    - `device`, `kernels`: the device, and the profile of its kernels.
    - `parts`: the number of equal products that one kernel runs one after the other, each with the
        efficiency of its own size. On B200, SimuMax measured grouped products at 0.30 of the peak,
        and single ones at 0.49.

    **Returns:**

    The larger of the times to compute and to move bytes, plus the overhead of the call, times
    `kernels.compute`; at least `kernels.floor_s`. A power limit slows the computing.
    """
    moving = kernels.find_efficiency("elementwise", "")
    table = kernels.find_efficiency(kind, dtype) or moving
    rate = device.memory_bandwidth_bytes_per_s
    if flop == 0 and table is not None:
        rate *= table.at(max(num_bytes, 1.0))
    elif moving is not None:
        # A kernel that computes streams its operands at the efficiency of large ones.
        rate *= moving.values[-1]
    seconds = num_bytes / rate
    overhead = 0.0 if table is None else table.latency_s
    if flop > 0:
        efficiency = 1.0 if table is None or table is moving else table.at(flop / parts)
        computing = flop / (efficiency * device.peak_flop_per_s[dtype])
        # Moving bytes does not wait for the clock of the compute units.
        seconds = max(seconds, clock_factor(device.power, kind) * computing)
    return max(kernels.compute * (seconds + overhead), kernels.floor_s)
