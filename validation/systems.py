"""Measured spreads of steps of systems, and the laws over systems that they give."""

import glob
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from msgspec.structs import replace
from scipy.optimize import least_squares

from prism_jax._estimate import in_core
from prism_jax.calibration._observe import upper_spread
from prism_jax.data import Priors, Variation, load_priors
from prism_jax.data._priors import EstimatedNormal, Line, Prior
from prism_jax.program import variability_of

from .published_models import device_of, has_experts
from .rows import note


# The laws of `kernels/priors.toml` that are fitted here.
OF_SYSTEMS = ("level", "level_experts", "drift", "drift_experts")
OF_SYSTEMS += ("system_spread", "system_shares", "system_excess")
_SYSTEM = ["round", "system", "bench"]  # The columns that name a system.
_LONG = 20  # Runs of fewer steps do not count where there are longer ones.
_SOURCE = "the systems"
# Residuals beyond this are outliers of the fit: 0.6 is what spreads differ by.
_FAR = 0.5


class System(NamedTuple):
    """Figures of the steps of a system's runs, each the median over runs."""

    name: str
    device: str
    experts: bool
    seconds: float
    spread: float
    share: float
    excess: float
    tail: float
    levels: np.ndarray
    drift: float
    std: float  # Over the median.

    @property
    def machine(self) -> str:
        """The first word of the system, so that `eos` and `eos-dfw` are one machine."""
        return re.split("[_.-]", re.sub(r"^\d+x", "", self.name.split(" ")[1]))[0].lower()

    @property
    def is_blackwell(self) -> bool:
        return "b" in self.device[:2]

    @property
    def group(self) -> str:
        hopper = "H100 and H200" if self.device.startswith(("h100", "h200")) else "others"
        generation = "B200 to GB300" if self.is_blackwell else hopper
        return "experts" if self.experts else f"dense, {generation}"


class Laws(NamedTuple):
    """The parameters of `step` in `variability.csv`, and the laws of `kernels/priors.toml`."""

    hopper: float
    blackwell: float
    seconds: dict[str, float]
    priors: Priors

    def parameters(self, is_blackwell: bool) -> dict[str, float]:
        return {"sigma": self.blackwell if is_blackwell else self.hopper, **self.seconds}


def spread_at(parameters: dict[str, float], one: System) -> float:
    """The predicted spread of a system's steps, without that of kernels."""
    law = Variation("", "step", "lognormal", parameters)
    found: Any = variability_of([law], step_s=one.seconds, experts=one.experts)
    return float(found.step.sigma)


def systems(folder: pathlib.Path) -> list[System]:
    """Those of `mlperf` and of `mlperf_v6` in a folder; a missing table is noted on stderr."""
    found = []
    for name, steps_of in (
        ("mlperf/step_times.parquet", _older),
        ("mlperf_v6/step_times.csv", _v6),
    ):
        if (path := folder / name).is_file():
            found += _each(steps_of(path), path.parent)
        else:
            note(f"{path} is missing and left out")
    return found


def _older(path: pathlib.Path) -> pl.DataFrame:
    table = _complete(pl.read_parquet(path), "i", "phase")
    return table.filter(pl.col("phase").is_in(["steady", ""])).sort("i")


def _v6(path: pathlib.Path) -> pl.DataFrame:
    """Without the first three steps, in which CUDA graphs are captured (`CUDA_GRAPH_WARMUP_STEPS=2`
    of all configurations), and without those after an evaluation where others are left.
    """
    table = _complete(pl.read_csv(path, infer_schema=False), "step", "note").sort("step")
    table = table.filter((pl.col("step") > 3) & ~pl.col("note").str.contains("first"))
    later = pl.col("note").str.contains("after_eval")
    return table.filter(~later | (later.mean().over(_SYSTEM) > 0.5))


def _complete(table: pl.DataFrame, number: str, text: str) -> pl.DataFrame:
    """A table with all columns that are read, and without rows that have no time, which are counted
    on stderr. Where steps have no numbers they are in order."""
    texts, time = (*_SYSTEM, "run", "device", text), pl.col("step_time_s")
    lacking = {*texts, number, "step_time_s"}.difference(table.columns)
    table = table.with_columns(pl.lit(None).alias(name) for name in lacking)
    order = pl.int_range(1, pl.len() + 1).over(*_SYSTEM, "run")
    made = [pl.col(name).cast(pl.String).fill_null("") for name in texts]
    made += [time.cast(pl.Float64, strict=False), pl.col(number).cast(pl.Int64, strict=False)]
    table = table.with_columns(*made[:-1], made[-1].fill_null(order))
    kept = table.filter(time.is_finite() & (time > 0))
    if len(kept) < len(table):
        note(f"{len(table) - len(kept)} steps without a time are left out")
    return kept


def _each(table, folder: pathlib.Path) -> Iterator[System]:
    for part in table.partition_by(_SYSTEM, maintain_order=True):
        round_, system, bench = (part[key][0] for key in _SYSTEM)
        told = [part["device"][0]]
        for path in folder.glob(f"systems/{glob.escape(f'{round_}__')}*{glob.escape(system)}.json"):
            told.append(str(msgspec.json.decode(path.read_bytes()).get("accelerator_model_name")))
        runs = [run["step_time_s"].to_numpy() for run in part.partition_by("run")]
        device = device_of(" ".join(filter(None, told)) or system)
        about = f"{round_} {system} {bench}", device, has_experts({"model": bench})
        yield System(*about, *_figures(runs))


def _figures(runs: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """Those of a system from `seconds` on."""
    levels = np.array([np.median(run) for run in runs])
    long = [run for run in runs if len(run) >= _LONG] or [*runs]
    relative = [run / np.median(run) - 1 for run in long]
    slow = np.concatenate([one[~in_core(one) & (one > 0)] for one in relative])
    spread = float(np.median([upper_spread(run) for run in long]))
    share = len(slow) / sum(map(len, long))
    excess = float(np.median(slow)) / spread if len(slow) and spread else np.nan
    tail = float(np.median([np.quantile(one, 0.95) for one in relative]))
    ends = [(run[: len(run) // 5 or 1], run[-(len(run) // 5 or 1) :]) for run in long]
    drift = np.median([np.log(np.median(first) / np.median(last)) for first, last in ends])
    median = float(np.median(levels))
    std = float(np.median([np.std(one) for one in relative]))
    return median, spread, share, excess, tail, np.log(levels / median), float(drift), std


def fitted(every: Sequence[System]) -> Laws:
    """The laws over these systems. The spread of a step is a share of it, by the generation of the
    device, and so many seconds, more for models with experts. These add as variances. Of steps that
    are shorter than the shortest with experts that was measured, the seconds are no larger share.
    """
    shortest = min((s.seconds for s in every if s.experts and s.seconds > 1), default=np.inf)

    def laws(logs: np.ndarray) -> Laws:
        hopper, blackwell, dense, experts = np.exp(logs).tolist()
        seconds = {"seconds": dense, "experts_seconds": experts}
        seconds["seconds_share"] = experts / shortest
        return Laws(hopper, blackwell, seconds, load_priors())

    def errors(logs: np.ndarray) -> list[float]:
        of = {is_blackwell: laws(logs).parameters(is_blackwell) for is_blackwell in (False, True)}
        return [float(np.log(spread_at(of[s.is_blackwell], s) / s.spread)) for s in every]

    start = np.log([0.002, 0.005, 0.003, 0.1])
    found = least_squares(errors, start, loss="soft_l1", f_scale=_FAR, diff_step=1e-4).x
    deviation = float(np.sqrt(np.sum(np.square(errors(found))) / (len(every) - len(start))))
    return laws(found)._replace(priors=_priors(every, deviation))


def _priors(every: Sequence[System], deviation: float) -> Priors:
    shipped = load_priors()
    seen = [one for one in every if one.share > 0]
    shares, excesses = np.log([(one.share, one.excess) for one in seen]).T
    slope = float(np.cov(shares, excesses)[0, 1] / np.var(shares, ddof=1))
    left = excesses - excesses.mean() - slope * (shares - shares.mean())
    around = float(np.sqrt(np.sum(left**2) / (len(seen) - 2)))
    about = {"number": len(every), "systems": tuple(one.name for one in every)}
    moments = float(shares.mean()), float(shares.std(ddof=1)), len(seen)
    changes: Any = {"system_spread": replace(shipped.system_spread, deviation=deviation, **about)}
    changes["system_shares"] = EstimatedNormal(*moments, _SOURCE)
    changes["system_excess"] = Line(float(excesses.mean()), slope, around, _SOURCE)
    for suffix, experts in (("", False), ("_experts", True)):
        mine = [one for one in every if one.experts == experts]
        free = sum(len(one.levels) - 1 for one in mine)
        if free > 2:
            squares = sum(float(np.sum(np.square(one.levels - one.levels.mean()))) for one in mine)
            drifts = np.array([one.drift for one in mine])
            wide = float(np.median(np.abs(drifts - np.median(drifts)))) * 1.4826
            changes[f"level{suffix}"] = Prior(0.0, float(np.sqrt(squares / free)), _SOURCE)
            changes[f"drift{suffix}"] = Prior(float(np.median(drifts)), wide, _SOURCE)
    return replace(shipped, **changes)
