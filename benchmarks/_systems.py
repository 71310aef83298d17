"""The tail of a system of which nothing is known: the law over the others, leaving it out."""

import pathlib
from typing import NamedTuple

import msgspec
import numpy as np

from prism_jax.data import Prior, Priors, Worth, load_priors
from prism_jax.fitting import core_spread, observe
from prism_jax.fitting._step_law import laws_of_systems


_DRAWN = 1000
_STEPS = 2000


class System(NamedTuple):
    """What the runs of a system say of its steps."""

    name: str
    spread: float
    share: float
    excess: float
    tail: float


def systems_table(folder: pathlib.Path) -> str:
    """For each system of GPT-3 and of Llama 3.1 405B (256 GPUs and more) where its p95/p50 lies
    with 90 %, by the spreads, shares and sizes of outliers of the others, and what was measured.
    """
    import polars as pl

    table = pl.read_parquet(folder / "step_times.parquet").filter(pl.col("phase") == "steady")
    large = table.filter(~pl.col("bench").str.ends_with("8b"))
    keys = ["round", "system", "bench"]
    systems = [_system(part) for part in large.partition_by(keys, maintain_order=True)]
    lines = ["| system | p95/p50 with 90 % | measured | |", "|---|---|---|---|"]
    held = []
    for one in systems:
        low, high = _band(_priors([other for other in systems if other is not one]))
        held.append(low <= one.tail <= high)
        out = "" if held[-1] else "(out)"
        lines.append(f"| {one.name} | {low:.4f} .. {high:.4f} | {one.tail:.4f} | {out} |")
    return "\n".join([*lines, "", f"held: {sum(held)} of {len(held)}"])


def _system(part) -> System:
    runs = [run.sort("i")["step_time_s"].to_numpy() for run in part.partition_by("run")]
    observed = observe(runs)
    spread = float(np.median([core_spread(run) for run in runs]))
    excess = float(np.median(observed.excess)) / observed.median if len(observed.excess) else np.nan
    tail = float(np.median([np.quantile(run, 0.95) / np.median(run) for run in runs]))
    share = len(observed.excess) / observed.num_steps
    return System(part["system"][0], spread, share, excess / spread, tail)


def _priors(others: list[System]) -> Priors:
    """The moments of the others; how outliers of one system differ is as shipped."""
    shipped = load_priors()
    spreads = np.array([one.spread for one in others])
    shares = np.array([one.share for one in others])
    logs = np.log([one.excess for one in others if one.excess > 0])
    width = shipped.outlier_spread.value
    source = "the other systems"
    rate = float(shares.mean() / shares.var(ddof=1))
    return msgspec.structs.replace(
        shipped,
        step_spread=Worth(float(np.median(spreads)), 0.0, source),
        system_spread=Prior(0.0, float(np.std(np.log(spreads), ddof=1)), source),
        outlier_share=Worth(float(shares.mean()), rate, source),
        outlier_excess=Worth(
            float(np.exp(np.median(logs))), (width / logs.std(ddof=1)) ** 2, source
        ),
    )


def _band(priors: Priors) -> tuple[float, float]:
    laws = laws_of_systems(priors, _DRAWN)
    tails = [np.quantile(factors, 0.95) / np.median(factors) for factors in _factors(laws)]
    low, high = np.quantile(tails, [0.05, 0.95])
    return float(low), float(high)


def _factors(laws):
    return (law.factors(_STEPS) for law in laws)
