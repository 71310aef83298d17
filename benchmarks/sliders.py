"""How exact the sliders of a report are: p50 and p95 at values that were not simulated, one by one
and for two pairs moved together, against fresh simulations with another key.

`python -m benchmarks.sliders`
"""

import itertools as it
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from prism_jax.analysis import LEVELS, P95, Rare, moved, sliders
from prism_jax.engine import SimulatedSteps, simulated_steps
from validation.tables import options


JOBS = ("gpt3-175b-h100-4096", "megatron-22b-a100-8", "llama-3-70b-h100-512")
# An error may be a tenth of the move, or this share of the figure.
SHARE, LEAST = 0.1, 0.003
_PLACES = (0.25, 0.75)
_SAMPLES = 16_384


def _errors_of(name: str) -> Iterator[np.ndarray]:
    """For each value, the errors of p50 and p95 over what is allowed; it is printed beside the
    moves of p95.
    """
    program = prism.compile_job(prism.load_job(name))
    found, own = sliders(program, key=jax.random.key(0)), _steps(program, {})
    values = [{one.name: x} for one in found.sliders for x in _between(one.values)]
    # The first two sliders of factors, between points.
    smooth = [one for one in found.sliders if not isinstance(one, Rare)][:2]
    values.append({one.name: _between(one.values)[2] for one in smooth})
    for each in [*values, found.check.values]:
        steps = _steps(program, each).steps
        simulated = np.quantile(steps, LEVELS) - (before := np.quantile(own.steps, LEVELS))
        by_slider = found.at(each) - found.law
        allowed = np.maximum(SHARE * np.abs(simulated), LEAST * before)
        off = ((by_slider - simulated) / allowed)[LEVELS.searchsorted([0.5, 0.95])]
        shown = ", ".join(f"{name} {value:.3g}" for name, value in each.items())
        moves = f"p95 {by_slider[P95]:+.4f} s by slider, {simulated[P95]:+.4f} s simulated"
        errors = "p50 {:+.2f}, p95 {:+.2f}".format(*off)
        print(f"{name:22} {shown:55} {moves}; error over allowed: {errors}", flush=True)
        yield off


def _steps(program, values: Mapping[str, float]) -> SimulatedSteps:
    options: dict[str, Any] = {"num_samples": _SAMPLES, "key": jax.random.key(7)}
    return simulated_steps(moved(program, values), **options)


def _between(values: np.ndarray) -> list[float]:
    """Values between those that were simulated."""
    return [float(a + t * (b - a)) for a, b in it.pairwise(values) for t in _PLACES]


def main() -> None:
    options(__doc__)
    errors = np.array([off for name in JOBS for off in _errors_of(name)])
    for name, mine in zip(("p50", "p95"), errors.T, strict=True):
        held = np.sum(np.abs(mine) <= 1)
        print(f"{name}: {held} of {len(mine)} within 10 % of the move or 0.3 %")


if __name__ == "__main__":
    main()
