r"""Mean latencies of compute kernels: a roofline with efficiencies that depend on size, or tables
by shape; and the clock that a power limit allows.

At a share $x$ of its highest clock, a device draws $S + (W - S) x^e$ watts: $S$ at any clock
(leakage), and $W$ in all at the highest. Where that is above the limit $L$, the clock falls to
$x = ((L - S) / (W - S))^{1/e}$, and what the clock bounds takes $1 / x$ times as long. $e$ is 3
where the voltage grows with the clock. A device that leaks more has less left to compute with.
"""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from ..data import Device, Kernels, Power, ShapeTable, column


# No device's clock falls further: a guard for those that leak nearly as much as their limit.
_LEAST_CLOCK = 0.1


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
        size, peaks = flop / parts, device.peak_flop_per_s
        if dtype in ("fp32", "tf32") and table is not None and table.variant in ("bf16", "fp16"):
            # What one in 16 bits reaches that takes as long: so NeuSight's ten steps in float32 on
            # A100 and V100 have a median error of 4 %, in place of 23 % (tests/test_float32.py).
            size *= peaks.get("bf16", peaks.get("fp16", peaks[dtype])) / peaks[dtype]
        efficiency = 1.0 if table is None or table is moving else table.at(size)
        computing = flop / (efficiency * peaks[dtype])
        # Moving bytes does not wait for the clock of the compute units.
        seconds = max(seconds, clock_factor(device.power, kind) * computing)
    return max(kernels.compute * (seconds + overhead), kernels.floor_s)


def _clock(
    power: Power, kind: str, limit_w: float, static_w: Float[np.ndarray, " devices"]
) -> Float[np.ndarray, " devices"]:
    """The clock that a limit allows, as a share of the highest."""
    # What computes draws the same on each device.
    of_gemm = kind in ("gemm", "convolution")
    computing = (power.gemm_w if of_gemm else power.attention_w) - power.static_w
    room = np.maximum(limit_w - static_w, 0.0) / computing
    return np.clip(room ** (1 / power.exponent), _LEAST_CLOCK, 1.0)


def clock_factors(
    power: Power, kind: str, z: Float[np.ndarray, " devices"]
) -> Float[np.ndarray, " devices"]:
    """How many times as long devices take that leak more or less than the median one.

    **Arguments:**

    - `power`: what the device draws.
    - `kind`: `gemm` or `convolution`; any other is attention.
    - `z`: the normal score of each device's leakage.

    **Returns:**

    The factors on what the clock bounds, over that of the median device at `rated_w` and its usual
    temperature. They do not fall with `z`.
    """
    # The temperature of a device and its chip are independent, so their spreads add as variances.
    sigma = np.hypot(power.leakage_sigma, power.leakage_per_k * power.temperature_k)
    static = power.static_w * np.exp(power.leakage_per_k * power.warmer_k + sigma * z)
    rated = _clock(power, kind, power.rated_w, np.array([power.static_w]))
    return rated / _clock(power, kind, power.limit_w, static)


def clock_factor(power: Power | None, kind: str) -> float:
    """How many times as long the median device takes for what the clock bounds: see
    `clock_factors`. One at `rated_w`, or if it is not known what the device draws.
    """
    if power is None or (power.limit_w == power.rated_w and power.warmer_k == 0):
        return 1.0
    return float(clock_factors(power, kind, np.zeros(1))[0])


def drawn(power: Power, kind: str) -> float:
    """What the median device draws in a kind of kernel, in watts; `""` is waiting. A warmer one
    leaks more, up to its limit.
    """
    leaked = power.static_w * math.expm1(power.leakage_per_k * power.warmer_k)
    watts = {"": power.static_w, "gemm": power.gemm_w, "attention": power.attention_w}
    watts["convolution"] = power.gemm_w
    return min(watts.get(kind, power.moving_w) + leaked, power.limit_w)


def shape_latency(table: ShapeTable, sizes: Mapping[str, float]) -> float:
    r"""The latency of a kernel with a shape, in seconds.

    $\log t = c + \log w + \sum_j f_j(\log p_j)$, with the work $w$ and the products $p_j$ of the
    table. A size below the fitted range counts as the smallest that was fitted. One above it counts
    as the largest in all $p_j$, so that the latency grows with the work alone.

    **Arguments:**

    - `table`: the kernel's table.
    - `sizes`: the columns of the table.
    """
    logs, within = {}, {}
    for name, (low, high) in table.ranges.items():
        size = max(sizes[name], low)
        within[name] = min(size, high)
        logs[name] = math.log(size)
    total = table.constant
    for name, power in table.work:
        total += power * logs[name]
    for name, size in within.items():
        if size < sizes[name]:
            logs[name] = math.log(size)
    for term in table.terms:
        log = 0.0
        for name, power in term.product:
            if name not in logs:
                logs[name] = math.log(column(name, within))
            log += power * logs[name]
        values = term.values
        last = len(values) - 1
        at = (log - term.low) / (term.high - term.low) * last
        if at <= 0:
            total += values[0]
        elif at >= last:
            total += values[last]
        else:
            i = int(at)
            total += values[i] + (at - i) * (values[i + 1] - values[i])
    return math.exp(total)


def gemm_latency(kernels: Kernels, dtype: str, m: float, n: float, k: float) -> float | None:
    """The latency of a product of an `m` by `k` with a `k` by `n` matrix, in seconds; `None` if the
    device has no table. In fp8 and fp4, the activations' quantisation is in it.
    """
    tables = kernels.find_shapes("gemm", dtype)
    return shape_latency(tables[0], {"m": m, "n": n, "k": k}) if tables else None
