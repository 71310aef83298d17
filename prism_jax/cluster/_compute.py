"""Mean latencies of compute kernels: a roofline with efficiencies that depend on size."""

from ..data import Device, Kernels


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

    - `kind`: `gemm` or `attention`, which compute at `dtype`; others only move bytes.
    - `dtype`: a key of the device's `peak_flop_per_s`.
    - `flop`: floating-point operations.
    - `num_bytes`: read and written.
    - `device`, `kernels`: on what.
    - `parts`: equal products that one kernel runs one after the other, each as efficient as alone:
        of grouped products, which SimuMax measured on B200 at 0.30 of the peak, and single ones
        at 0.49.

    **Returns:**

    The larger of the times of computing and of moving, and the overhead of the call, times
    `kernels.compute`; `kernels.floor_s` at least.
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
        seconds = max(seconds, flop / (efficiency * device.peak_flop_per_s[dtype]))
    return max(kernels.compute * (seconds + overhead), kernels.floor_s)
