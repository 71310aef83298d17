"""How the law of the step time follows the parameters that matter most."""

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._misc import unknown_name
from ..cluster import COLLECTIVES
from ..engine import SimulatedSteps, check_program, simulated_steps
from ..latency import Mixture, scale_spread
from ..program import Program
from ._check import check_num_steps
from ._knobs import Label, turned, varying_parts


_HALF = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 400)
# The levels of a law, dense in both tails. They include p5, p50, p95 and p99.
LEVELS = np.array([*_HALF, 500, *(1000 - x for x in reversed(_HALF))]) / 1000
P95 = LEVELS.tolist().index(0.95)
_POSITIONS = 25
# From a parameter's own value to the one beside it, for the derivative.
_NEAR = 0.1
_FACTORS = (0.5, 1.0, 2.0)
_RARE = _SLOW_GPUS, _STALLS = "slow GPUs", "stall rate"
SHARED = {
    "rank": "spread of GPUs",
    "step": "spread of steps",
    "worker_step": "spread of workers",
    "microbatch": "spread of microbatches",
    "network": "congestion of the network",
    "expert_load": "unevenness of experts",
}


@dataclasses.dataclass(frozen=True, eq=False)
class AbstractSlider(abc.ABC):
    """A parameter, and how quantiles follow it. All others are as they are.

    **Attributes:**

    - `name`: the parameter.
    - `own`: the value that it has in the program: one for a factor.
    - `values`: `(3,)`, the values that were simulated, rising.
    - `laws`: `(3, levels)`, the quantiles at `LEVELS` at each of these, in seconds.
    """

    name: str
    own: float
    values: Float[np.ndarray, "3"]
    laws: Float[np.ndarray, "3 levels"]

    @abc.abstractmethod
    def law(self, value: float) -> Float[np.ndarray, " levels"]:
        """The quantiles at a value within the range, in seconds."""

    @abc.abstractmethod
    def label(self, value: float) -> str:
        """A value, as it is shown."""

    def change(self, value: float) -> Float[np.ndarray, " levels"]:
        """By how many seconds each quantile changes from the parameter's own value."""
        if not self.values[0] <= value <= self.values[-1]:
            low, high = self.values[[0, -1]]
            raise ValueError(f"`{self.name}` got {value!r}; give a value in [{low:g}, {high:g}].")
        return self.law(value) - self.law(self.own)

    def positions(self) -> list[float]:
        """Evenly spaced values with, in the place of the nearest, the parameter's own."""
        places = np.linspace(self.values[0], self.values[-1], _POSITIONS)
        places[np.argmin(np.abs(places - self.own))] = self.own
        return places.tolist()


@dataclasses.dataclass(frozen=True, eq=False)
class Smooth(AbstractSlider):
    """A spread or a mean, whose own value is the second: on either side, each quantile follows the
    parabola that has the simulated derivative there.

    **Attributes:**

    - `slope`: `(levels,)`, the derivative of the quantiles with respect to the value.
    """

    slope: Float[np.ndarray, " levels"]

    def law(self, value: float) -> Float[np.ndarray, " levels"]:
        _, own, _ = self.values
        end = 2 if value > own else 0
        width = self.values[end] - own
        bend = (self.laws[end] - self.laws[1] - width * self.slope) / width**2
        return self.laws[1] + (value - own) * (self.slope + (value - own) * bend)

    def label(self, value: float) -> str:
        return f"x {value:.3g}"


@dataclasses.dataclass(frozen=True, eq=False)
class Rare(AbstractSlider):
    """A number of rare events: each adds the same chance to be later than a time, so the logarithm
    of the share of steps that are not is linear in the number, where quantiles jump.
    """

    def law(self, value: float) -> Float[np.ndarray, " levels"]:
        k = int(value >= self.values[1])
        before, after = self.laws[k : k + 2]
        times = np.union1d(before, after)
        fewest = np.log(LEVELS[0] / 10)
        logs = [np.interp(times, law, np.log(LEVELS), fewest, 0.0) for law in (before, after)]
        added = logs[1] - logs[0]
        # Before the first step of the later law, of which too few were simulated to tell.
        added[times < after[0]] = added[times == after[0]]
        t = (value - self.values[k]) / (self.values[k + 1] - self.values[k])
        return np.interp(np.log(LEVELS), np.maximum.accumulate(logs[0] + t * added), times)

    def label(self, value: float) -> str:
        return f"{value:.3g} expected"


class Check(NamedTuple):
    """Sliders moved together to values that were not simulated, and p95 there in seconds: by the
    sliders, and simulated with another key.
    """

    values: dict[str, float]
    p95: float
    simulated: float


@dataclasses.dataclass(frozen=True, eq=False)
class Sliders:
    """The result of `sliders`.

    **Attributes:**

    - `law`: `(levels,)`, the quantiles of the program's own step time at `LEVELS`, in seconds.
    - `sliders`: a slider for each parameter: the number of slow GPUs first, then that which moves
        p95 most.
    - `check`: how exact p95 is where the first two are moved together.
    - `num_samples`: how many steps each point is from.
    """

    law: Float[np.ndarray, " levels"]
    sliders: tuple[AbstractSlider, ...]
    check: Check
    num_samples: int

    def at(self, values: Mapping[str, float]) -> Float[np.ndarray, " levels"]:
        """The quantiles at `LEVELS` in seconds, with some parameters at other values. What several
        parameters change is added.

        **Raises:**

        `ValueError` for a parameter without a slider, or a value beyond its range.
        """
        by_name = {slider.name: slider for slider in self.sliders}
        for name in values:
            if name not in by_name:
                raise ValueError(unknown_name("slider", name, tuple(by_name)))
        changes = [by_name[name].change(value) for name, value in values.items()]
        return np.maximum.accumulate(sum(changes, self.law))


def sliders(
    program: Program, *, most: int = 6, num_samples: int = 4096, key: "jax.Array"
) -> Sliders:
    """Simulates the parameters that move p95 of the step time most at three values each, with
    common random numbers, and beside these for the derivatives.

    **Arguments:**

    - `program`: the step.
    - `most`: the most sliders.
    - `num_samples`: how many steps to simulate at each point.
    - `key`: a `jax.random` key.

    **Returns:**

    A [`Sliders`][]: of the number of slow GPUs, of factors on spreads (0 to 4) and on mean
    latencies of collectives (0.5 to 2), and of the rate of stalls.
    """
    check_program(program, key)
    options: dict[str, Any] = {"num_samples": check_num_steps(num_samples)}
    base = simulated_steps(moved(program, {}), key=key, **options)

    def law(values: Mapping[str, float], key: "jax.Array" = key) -> np.ndarray:
        return _law(simulated_steps(moved(program, values), key=key, like=base, **options))

    own, parameters, chosen = _law(base), slider_parameters(program), []
    highest = {name: law({name: values[-1]}) for name, (_, values, *_) in parameters.items()}
    # The number of slow GPUs, which can be changed, comes first.
    reach = {name: abs(highest[name] - own)[P95] for name in highest}
    order = sorted(reach, key=lambda name: (name != _SLOW_GPUS, -reach[name]))
    for name in order[:most]:
        at, values, *_ = parameters[name]
        laws = [own if v == at else law({name: v}) for v in values[:-1]]
        curve = name, at, values, np.stack([*laws, highest[name]])
        if name in _RARE:
            chosen.append(Rare(*curve))
        else:
            chosen.append(Smooth(*curve, (law({name: at + _NEAR}) - own) / _NEAR))
    middle = {slider.name: float(slider.values[1:].mean()) for slider in chosen[:2]}
    simulated = law(middle, jax.random.fold_in(key, 1))[P95]
    result = Sliders(own, (*chosen,), Check(middle, 0.0, 0.0), num_samples)
    check = Check(middle, float(result.at(middle)[P95]), float(simulated))
    return dataclasses.replace(result, check=check)


def moved(program: Program, values: Mapping[str, float]) -> Program:
    """The program with parameters at other values, named as in `Sliders`. Only values differ, so
    that all points share their compiled code.
    """
    factors, parameters = {}, slider_parameters(program)
    for name, value in values.items():
        if name == SHARED["rank"] and isinstance(law := program.variability.rank, Mixture):
            # Of GPUs of one kind: how slow the slow ones are stays as it is.
            kinds = tuple(scale_spread(kind, value) for kind in law.components)
            program = _with_gpus(program, Mixture(law.weights, kinds))
            continue
        *_, labels = parameters[name]
        if name == _SLOW_GPUS:
            # The law is divided by its mean, but the other GPUs are as fast as before.
            program, value = _with_slow_gpus(program, value)
        factors |= dict.fromkeys(labels, value)
    return turned(program, factors)


def _with_slow_gpus(program: Program, number: float) -> tuple[Program, float]:
    """The program with a number of slow GPUs, and by what factor a GPU is slower on average."""
    law, share = program.variability.rank, number / program.world_size
    assert isinstance(law, Mixture)
    changed = Mixture(jnp.asarray([1 - share, share], law.weights.dtype), law.components)
    return _with_gpus(program, changed), float(changed.mean() / law.mean())


def _with_gpus(program: Program, law: Mixture) -> Program:
    return eqx.tree_at(lambda of: of.variability.rank, program, law)


def _law(simulated: SimulatedSteps) -> Float[np.ndarray, " levels"]:
    return np.quantile(simulated.steps, LEVELS)


def slider_parameters(program: Program) -> dict[str, tuple[float, np.ndarray, list[Label]]]:
    """For each parameter its own value, the three to simulate, and the knobs that it turns."""
    laws, parts = program.variability, varying_parts(program)
    compute = [kind for kind in parts["kernel"] if kind not in COLLECTIVES]
    collectives = [kind for kind in COLLECTIVES if kind in parts["kernel"]]

    def labels(group: str, names: Iterable[str], moment: str = "spread") -> list[Label]:
        return [(group, name, moment) for name in names]

    spreads = {
        "spread of compute kernels": labels("kernel", (k for k in compute if k in laws.residual)),
        "spread of collectives": labels("kernel", (k for k in collectives if k in laws.residual)),
    }
    shared = [name for name in SHARED if name in parts["shared factor"]]
    spreads |= {SHARED[name]: labels("shared factor", [name]) for name in shared}
    spreads[_STALLS] = labels("stalls", parts["stalls"])
    means = {f"mean of {kind}": labels("kernel", [kind], "mean") for kind in collectives}
    parameters = {}
    for knobs, values in ((spreads, (0.0, 1.0, 4.0)), (means, _FACTORS)):
        parameters |= {name: (1.0, np.array(values), of) for name, of in knobs.items() if of}
    law, gpus = laws.rank, program.world_size
    if isinstance(law, Mixture) and len(law.components) == 2:
        own = float(law.weights[1] / law.weights.sum()) * gpus
        number = own or 4.0
        if 4 * number <= gpus / 4:
            values = np.array([0, number, 4 * number])
            parameters[_SLOW_GPUS] = own, values, labels("kernel", compute, "mean")
    return parameters
