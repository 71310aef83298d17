r"""The gamma law near its normal limit, as power series.

N. M. Temme, "Asymptotic inversion of incomplete gamma functions", Mathematics of Computation 58
(1992). With shape $a$ and $\lambda = x / a$, let $\eta^2 / 2 = \lambda - 1 - \log \lambda$. The
score of $x$ is $\sqrt{a} \eta_0$, where $\eta = \eta_0 + \varepsilon(\eta_0)$ and
$\varepsilon = \varepsilon_1 / a + \varepsilon_2 / a^2 + \dots$ solves

$$a (\eta_0 \varepsilon + \varepsilon^2 / 2)
    = \ell(\eta_0 + \varepsilon) + \log(1 + \varepsilon') - \log \Gamma^*(a),$$

with $\ell(\eta) = \log(\eta / (\lambda - 1))$ and $\Gamma^*$ the ratio of the gamma function to
Stirling's formula. In the other direction $\eta_0 = \eta + \delta(\eta)$, where

$$a (\eta \delta + \delta^2 / 2) = -\ell(\eta) + \log(1 + \delta') + \log \Gamma^*(a).$$

All are analytic, with radius of convergence $2 \sqrt{\pi}$.
"""

import functools as ft
import math

import numpy as np


_ORDERS = 6
_TERMS = 44


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The product of two series in (1 / a, eta), truncated."""
    out = np.zeros_like(x)
    for i in range(len(x)):
        if x[i].any():
            for j in range(len(x) - i):
                out[i + j] += np.convolve(x[i], y[j])[: x.shape[1]]
    return out


def _derivative(x: np.ndarray) -> np.ndarray:
    return np.append(x[1:] * np.arange(1, len(x)), 0.0)


@ft.lru_cache
def temme_series() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""Coefficients of $(\lambda - 1) / \eta$ in $\eta$, each $\varepsilon_k$, and each $\delta_k$.

    **Returns:**

    Arrays `(terms,)`, `(orders, terms)` and `(orders, terms)`, the constant terms first.
    """
    # A derivative and a division cost one coefficient each, at every order.
    n = _TERMS + 4 * _ORDERS
    c = np.zeros(n + 2)
    c[1] = 1.0
    for k in range(2, n + 2):
        cross = sum(c[i] * (k + 1 - i) * c[k + 1 - i] for i in range(2, k))
        c[k] = (c[k - 1] - cross) / (k + 1)
    excess = c[1:]  # (lambda - 1) / eta

    # The logarithm of a series whose constant term is one.
    log_excess = np.zeros(n)
    for k in range(1, n):
        cross = sum(i * log_excess[i] * excess[k - i] for i in range(1, k))
        log_excess[k] = excess[k] - cross / k
    derivatives = [-log_excess]
    for _ in range(_ORDERS):
        derivatives.append(_derivative(derivatives[-1]))

    stirling = np.zeros(_ORDERS + 1)
    stirling[1::2] = [1 / 12, -1 / 360, 1 / 1260][: len(stirling[1::2])]

    def solve(shift: bool) -> np.ndarray:
        epsilon = np.zeros((_ORDERS + 1, n))
        for k in range(_ORDERS):
            right = -log_excess if k == 0 else np.zeros(n)
            right[0] -= stirling[k]
            right = right if shift else -right
            power = slope_power = np.zeros_like(epsilon)
            power[0, 0] = 1.0
            slope = np.stack([_derivative(row) for row in epsilon])
            for m in range(1, k + 1):
                slope_power = _product(slope, slope_power)
                right -= (-1) ** m / m * slope_power[k]
                if shift:
                    power = _product(epsilon, power)
                    right += np.convolve(derivatives[m], power[k])[:n] / math.factorial(m)
            right -= 0.5 * _product(epsilon, epsilon)[k + 1]
            epsilon[k + 1, : n - 1] = right[1:]
        return epsilon[1:, :_TERMS]

    return excess[:_TERMS], solve(True), solve(False)
