r"""The clock that a power limit allows, and what a device draws.

At a share $x$ of its highest clock, a device draws $S + (W - S) x^e$ watts: $S$ at any clock
(leakage), and $W$ in all at the highest. Where that is above the limit $L$, the clock falls to
$x = ((L - S) / (W - S))^{1/e}$, and what the clock bounds takes $1 / x$ times as long. $e$ is 3
where the voltage grows with the clock. A device that leaks more has less left to compute with.
"""

import math

import numpy as np
from jaxtyping import Float

from ..data import Power


# No device's clock falls further: a guard for those that leak nearly as much as their limit.
_LEAST_CLOCK = 0.1


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
    known = {"": power.static_w, "gemm": power.gemm_w, "attention": power.attention_w}
    known["convolution"] = power.gemm_w
    return min(known.get(kind, power.moving_w) + leaked, power.limit_w)
