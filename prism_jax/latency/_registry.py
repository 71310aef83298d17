from collections.abc import Callable, Mapping

from jax.typing import ArrayLike

from .._misc import unknown_name
from ._base import AbstractLatency
from ._check import check
from ._constant import Constant
from ._gamma import Gamma
from ._lognormal import LogNormal, ShiftedLogNormal
from ._mixture import Mixture
from ._normal import Normal
from ._three_moment import ThreeMoment
from ._weibull import Weibull


def _slow_mixture(sigma: float, slow_weight: float, slow_factor: float) -> Mixture:
    if not 0 <= slow_weight <= 1:
        raise ValueError(
            f"`lognormal-mixture` got `slow_weight={slow_weight}`; it must be between 0 and 1."
        )
    body, slow = LogNormal(1.0, sigma), LogNormal(slow_factor, sigma)
    return Mixture([1.0 - slow_weight, slow_weight], (body, slow))


# A family's constructor, and its parameters in order: the default, or None where one must be given.
_FAMILIES: dict[str, tuple[Callable[..., AbstractLatency], dict[str, float | None]]] = {
    "constant": (Constant, {"value": 1.0}),
    "gamma": (Gamma, {"mean": 1.0, "cv": None}),
    "lognormal": (LogNormal, {"median": 1.0, "sigma": None}),
    "lognormal-mixture": (
        _slow_mixture,
        {"sigma": None, "slow_weight": None, "slow_factor": None},
    ),
    "normal": (Normal, {"mean": 1.0, "std": None}),
    "shifted-lognormal": (ShiftedLogNormal, {"shift": None, "median": 1.0, "sigma": None}),
    "three-moment": (ThreeMoment, {"mean": 1.0, "std": None, "skewness": None}),
    "weibull": (Weibull, {"scale": 1.0, "shape": None}),
}


def latency_families() -> dict[str, tuple[str, ...]]:
    """The names that `make_latency` knows, and the parameters of each."""
    return {name: tuple(parameters) for name, (_, parameters) in _FAMILIES.items()}


def make_latency(family: str, parameters: Mapping[str, ArrayLike]) -> AbstractLatency:
    """The latency that a data file names.

    **Arguments:**

    - `family`: one of `constant`, `gamma` (`mean`, `cv`), `lognormal` (`median`, `sigma`),
        `lognormal-mixture` (`sigma`, `slow_weight`, `slow_factor`: a log-normal of median one
        that is `slow_factor` times as long with probability `slow_weight`), `normal` (`mean`,
        `std`), `shifted-lognormal` (`shift`, `median`, `sigma`), `three-moment` (`mean`, `std`,
        `skewness`) and `weibull` (`scale`, `shape`).
    - `parameters`: the parameters by name, numbers or arrays without axes, relative to a scale
        that the caller applies with `Scaled`. `value`, `mean`, `median` and `scale` may be left
        out, and are then one.

    **Returns:**

    A latency without batch axes, of the default dtype.

    **Raises:**

    `ValueError` for an unknown family, an unknown or missing parameter, or a bad value.
    """
    if family not in _FAMILIES:
        raise ValueError(unknown_name("latency family", family, _FAMILIES))
    make, known = _FAMILIES[family]
    for name in parameters:
        if name not in known:
            raise ValueError(unknown_name(f"parameter of `{family}`", name, known))
    values = {name: parameters.get(name, default) for name, default in known.items()}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ValueError(
            f"The latency family `{family}` lacks `{'` and `'.join(missing)}`; give "
            f"{'it' if len(missing) == 1 else 'them'} a number."
        )
    latency = make(*values.values())
    check(latency)
    return latency
