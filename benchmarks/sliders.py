"""How exact the sliders of a report are: p50 and p95 at values that were not simulated, one by one
and for two pairs moved together, against fresh simulations with another key.

`python -m benchmarks.sliders [JOB ...] [--json]`
"""

import argparse
import itertools as it
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import prism_jax as prism
from prism_jax.analysis import LEVELS, P50, P95, Rare, Sliders, moved, sliders
from prism_jax.engine import SimulatedSteps, simulated_steps


JOBS = ("gpt3-175b-h100-4096", "megatron-22b-a100-8", "llama-3-70b-h100-512")
# An error may be a tenth of the move, or this share of the figure.
SHARE, LEAST = 0.1, 0.003
_PLACES = (0.25, 0.75)


def rows_of(name: str, num_samples: int = 16_384) -> list[dict[str, Any]]:
    """A row for each value: the moves by the slider and simulated, and their difference over what
    is allowed, of p50 and p95.
    """
    program = prism.compile_job(prism.load_job(name))
    found = sliders(program, key=jax.random.key(0))
    own = _steps(program, {}, num_samples, None)

    def row(values: Mapping[str, float]) -> dict[str, Any]:
        steps = _steps(program, values, num_samples, own).steps
        simulated = np.quantile(steps, LEVELS) - (before := np.quantile(own.steps, LEVELS))
        by_slider = found.at(values) - found.law
        allowed = np.maximum(SHARE * np.abs(simulated), LEAST * before)
        off = (by_slider - simulated) / allowed
        cells = {f"{n}_off": float(off[i]) for n, i in (("p50", P50), ("p95", P95))}
        shown = {"by_slider_s": float(by_slider[P95]), "simulated_s": float(simulated[P95])}
        return {"job": name, "values": dict(values), **shown, **cells}

    alone = [{one.name: x} for one in found.sliders for x in _between(one.values)]
    return [row(values) for values in [*alone, _pair(found), found.check.values]]


def _steps(program, values, num_samples: int, like: SimulatedSteps | None) -> SimulatedSteps:
    options: dict[str, Any] = {"num_samples": num_samples, "key": jax.random.key(7), "margin": 16}
    return simulated_steps(moved(program, values), like=like, **options)


def _between(values: np.ndarray) -> list[float]:
    """Values between those that were simulated."""
    return [float(a + t * (b - a)) for a, b in it.pairwise(values) for t in _PLACES]


def _pair(found: Sliders) -> dict[str, float]:
    """The first two sliders of factors, between points."""
    smooth = [one for one in found.sliders if not isinstance(one, Rare)][:2]
    return {one.name: _between(one.values)[2] for one in smooth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", default=JOBS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [row for name in given.jobs for row in rows_of(name)]
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        values = ", ".join(f"{name} {value:.3g}" for name, value in row["values"].items())
        print(
            f"{row['job']:22} {values:55} p95 {row['by_slider_s']:+.4f} s by slider, "
            f"{row['simulated_s']:+.4f} s simulated; error over allowed: "
            f"p50 {row['p50_off']:+.2f}, p95 {row['p95_off']:+.2f}",
            flush=True,
        )
    for name in ("p50", "p95"):
        held = sum(abs(row[f"{name}_off"]) <= 1 for row in rows)
        print(f"{name}: {held} of {len(rows)} within 10 % of the move or 0.3 %")


if __name__ == "__main__":
    main()
