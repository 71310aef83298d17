"""The tail of a new system, predicted from the laws of all other systems."""

import pathlib
import re
from typing import NamedTuple

import msgspec
import numpy as np

from prism_jax.calibration._epistemic import laws_of_systems
from prism_jax.calibration._observe import core_spread, observe
from prism_jax.data import Priors, Sampled, load_priors
from prism_jax.data._priors import Line, SampledSpread


_DRAWN = 1000
_STEPS = 1000
_GENERATIONS = (
    ("h100-sxm", "h200-sxm", "h100-96g", "h20"),
    ("b200", "gb200", "b300", "gb300"),
)
_SOURCE = "the systems"


class System(NamedTuple):
    """Figures of the steps of a system's runs."""

    name: str
    device: str
    spread: float
    share: float
    excess: float
    tail: float

    @property
    def machine(self) -> str:
        """The first word of the name, so that `eos` and `eos-dfw` are one machine."""
        return re.split("[_.-]", self.name)[0]


def systems(folder: pathlib.Path) -> list[System]:
    """Those of GPT-3 and of Llama 3.1 405B: 256 GPUs and more."""
    import polars as pl

    table = pl.read_parquet(folder / "step_times.parquet").filter(pl.col("phase") == "steady")
    large = table.filter(~pl.col("bench").str.ends_with("8b"))
    keys = ["round", "system", "bench"]
    return [_system(part) for part in large.partition_by(keys, maintain_order=True)]


def systems_table(folder: pathlib.Path) -> str:
    """The predicted 90 % interval for each system's p95/p50, from all other systems and from those
    of other machines, beside the measured p95/p50; and the laws of all systems.
    """
    every = systems(folder)
    header = ("system", "p95/p50, without the system", "p95/p50, without its machine")
    header += ("p95/p50, measured",)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    held = np.zeros(2, int)
    for one in every:
        others = [other for other in every if other is not one]
        apart = [other for other in others if other.machine != one.machine]
        bands = [_band(left, one.device) for left in (others, apart)]
        inside = [low <= one.tail <= high for low, high in bands]
        held += inside
        cells = [
            f"{low:.4f} .. {high:.4f}" + ("" if is_in else " (out)")
            for (low, high), is_in in zip(bands, inside, strict=True)
        ]
        lines.append("| " + " | ".join([one.name, *cells, f"{one.tail:.4f}"]) + " |")
    held_in = f"{held[0]} and {held[1]} of {len(every)} systems"
    lines += ["", f"The intervals contain the measured value for {held_in}.", ""]
    return "\n".join([*lines, *_laws(fitted(every))])


def _laws(priors: Priors) -> list[str]:
    """A table of the laws, as in `kernels/priors.toml`."""
    named: dict[str, Sampled] = {
        f"spread, {', '.join(one.devices) or 'any device'}": one for one in priors.system_spreads
    }
    named["share of outliers"] = priors.system_shares
    rows = [
        f"| {name} | {one.mean:.2f} | | {one.deviation:.2f} | {one.number} |"
        for name, one in named.items()
    ]
    line = priors.system_excess
    numbers = f"{line.mean:.2f} | {line.slope:.2f} | {line.deviation:.2f}"
    header = ["| law | mean | slope | standard deviation | systems |", "|" + "---|" * 5]
    return [*header, *rows, f"| excess of outliers | {numbers} | |"]


def _system(part) -> System:
    runs = [run.sort("i")["step_time_s"].to_numpy() for run in part.partition_by("run")]
    observed = observe(runs)
    spread = float(np.median([core_spread(run) for run in runs]))
    excess = float(np.median(observed.excess)) / observed.median if len(observed.excess) else np.nan
    tail = float(np.median([np.quantile(run, 0.95) / np.median(run) for run in runs]))
    share = len(observed.excess) / observed.num_steps
    name = part["system"][0]
    return System(name, _device(name), spread, share, excess / spread, tail)


def _device(name: str) -> str:
    """By the names of MLPerf's systems."""
    parts = {"H200": "h200-sxm", "b200": "b200", "carina": "gb200", "tyche": "gb200"}
    return next((device for part, device in parts.items() if part in name), "h100-sxm")


def fitted(systems: list[System]) -> Priors:
    """The shipped priors with the laws over these systems."""
    groups = [*_GENERATIONS, ()]
    spreads = [
        SampledSpread(*_moments([np.log(one.spread) for one in mine]), _SOURCE, devices)
        for devices in groups
        if len(mine := [one for one in systems if not devices or one.device in devices]) > 2
    ]
    rows = [one for one in systems if one.share > 0]
    shares, excesses = np.log([(one.share, one.excess) for one in rows]).T
    slope = float(np.cov(shares, excesses)[0, 1] / np.var(shares, ddof=1))
    left = excesses - excesses.mean() - slope * (shares - shares.mean())
    deviation = float(np.sqrt(np.sum(left**2) / (len(rows) - 2)))
    return msgspec.structs.replace(
        load_priors(),
        system_spreads=tuple(spreads),
        system_shares=Sampled(*_moments(shares), _SOURCE),
        system_excess=Line(float(excesses.mean()), slope, deviation, _SOURCE),
    )


def _moments(values) -> tuple[float, float, int]:
    return float(np.mean(values)), float(np.std(values, ddof=1)), len(values)


def _band(systems: list[System], device: str) -> tuple[float, float]:
    tails = [_tail(law.factors(_STEPS)) for law in laws_of_systems(fitted(systems), device, _DRAWN)]
    low, high = np.quantile(tails, [0.05, 0.95])
    return float(low), float(high)


def _tail(steps: np.ndarray) -> float:
    return float(np.quantile(steps, 0.95) / np.median(steps))
