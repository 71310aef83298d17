"""The level and the noise that families imply for steps at other scales.

All families share one `network`, `constant_s` and `growth`; each family has a factor on compute.
The noise of collectives is estimated for each family and for all families together.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from prism_jax.calibration import _scale as scaling
from prism_jax.calibration._calibrate import fit_level
from prism_jax.calibration._observe import law_of_steps, observe_runs, spread_of
from prism_jax.calibration._scale import CoreSplit, Problem, scale_of, without_calibration
from prism_jax.data import Priors, load_priors
from prism_jax.data._priors import Prior
from prism_jax.prediction import constant_step, slope_of_level, with_level

from .families import families, tail_of
from .tables import Folder, by, table, table_of


# Of the three before there are families: what the collectives alone say of the first (see
# `kernels/priors.toml`), and next to nothing of the others.
BEFORE = np.array([[0.22, 0.15], [0.0, 0.1], [0.0, 0.02]])
# What a median is off by in any case.
_NOISE = 2e-3
_ITERATIONS = 4
# Steps simulated of each system, and the least part of a variance that tells what makes it.
_SAMPLES = 8192
_TOLD = 0.01
# Numbers of consecutive steps of one run, how many stretches of each, and factors drawn of a law.
_NUMBERS = (20, 40, 60, 120, 100_000)
_STRETCHES = 12
_DRAWN = 8192


# A median as a function of the level, near some level: its family, what its logarithm lacks,
# and the slope of that of the step.
Linear = tuple[str, float, np.ndarray]


def linearised(families: Mapping[str, Sequence]) -> tuple[np.ndarray, list[Linear]]:
    """The level that all families want, and their medians near it."""
    each = []
    for family, systems in families.items():
        for one in systems:
            plain: Any = without_calibration(one.job, "a family").kernels
            about = family, systems[0].job.layout.dp, one.median
            each.append((*about, constant_step(one.job), plain))
    compute = dict.fromkeys(families, 0.0)
    level, found = BEFORE[:, 0], []
    for _ in range(_ITERATIONS):
        found = []
        for family, replicas, median, seconds, plain in each:
            kernels = with_level(plain, np.array([compute[family], *level]), replicas)
            missing = float(np.log(median / seconds(kernels)))
            found.append((family, missing, slope_of_level(seconds, kernels)))
        level, computes = solved(found, level)
        compute = {family: compute[family] + change for family, change in computes.items()}
    return level, found


def solved(found: Sequence[Linear], level: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """The most likely level, and how much more each family's compute takes, as a logarithm."""
    names = list(dict.fromkeys(family for family, *_ in found))
    rows, wanted = [], []
    for family, missing, slope in found:
        of_compute = slope[0] * (np.array(names) == family)
        rows.append(np.array([*of_compute, *slope[1:]]) / _NOISE)
        wanted.append(missing / _NOISE)
    for i, (mean, deviation) in enumerate(BEFORE):
        rows.append(np.eye(1, len(names) + 3, len(names) + i)[0] / deviation)
        wanted.append((mean - level[i]) / deviation)
    change = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    return level + change[len(names) :], dict(zip(names, map(float, change), strict=False))


def splits_of(families: Mapping[str, Sequence]) -> dict[str, list[CoreSplit]]:
    """What makes the spread of the core of each system, at the level that it was measured at."""
    priors, found = load_priors(), {family: [] for family in families}
    for family, systems in families.items():
        replicas = systems[0].job.layout.dp
        for one in systems:
            scale = scale_of(without_calibration(one.job, "a family"), one.runs)
            problem = Problem([scale], replicas, priors, jax.random.key(0), _SAMPLES)
            level = fit_level(problem, np.array([one.median]), np.array([_NOISE]))
            found[family] += scaling.splits_of(problem, problem.kernels_at(level.values))
    return found


def noises(splits: Mapping[str, list[CoreSplit]]) -> tuple[dict[str, float], Prior, Prior]:
    """Of each family the mean logarithm of the noise that makes all of what steps do not share; the
    law of it over families, less what systems of one family differ by; and that. Where the usual
    noise makes less than a hundredth of its variance, nothing is told.
    """
    usual = np.exp(2 * load_priors().collective_noise.mean)
    logs = {}
    for name, mine in splits.items():
        if all(one.collectives * usual > _TOLD * one.alone for one in mine):
            logs[name] = [np.log((x.alone - x.kernels) / x.collectives) / 2 for x in mine]
    means = {family: float(np.mean(mine)) for family, mine in logs.items()}
    mean, variance = np.mean([*means.values()]), np.var([*means.values()], ddof=1)
    degrees = sum(len(mine) - 1 for mine in logs.values())
    within = sum(np.var(mine) * len(mine) for mine in logs.values()) / degrees
    shared = np.mean([1 / len(mine) for mine in logs.values()])
    between = float(np.sqrt(max(variance - within * shared, 0)))
    law = Prior(float(mean), between, "families")
    return means, law, Prior(0.0, float(np.sqrt(within)), "families")


def priors_without(near: Any, splits: Mapping[str, list[CoreSplit]], family: str) -> Priors:
    """The shipped priors, with the means that all families say but those that share a machine."""
    level, found = near
    apart = {name: mine for name, mine in splits.items() if machine_of(name) != machine_of(family)}
    network, constant, growth = solved([one for one in found if one[0] in apart], level)[0]
    means = {"network": network, "constant_s": max(constant, 0.0), "growth": growth}
    means["collective_noise"] = noises(apart)[1].mean
    shipped, replace = load_priors(), msgspec.structs.replace
    moved = {name: replace(getattr(shipped, name), mean=float(x)) for name, x in means.items()}
    return replace(shipped, **moved)


def priors_text(folder: Folder) -> str:
    """The priors that all families imply, and those without the families of one machine."""
    every = families(folder)
    near, splits = linearised(every), splits_of(every)
    means, noise, scale = noises(splits)
    rows = [{"out": "none", "means": [*near[0], noise.mean]}]
    for mine in by("machine", ({"machine": machine_of(f), "family": f} for f in every)).values():
        one = priors_without(near, splits, mine[0]["family"])
        four = one.network, one.constant_s, one.growth, one.collective_noise
        letters = ", ".join(row["family"][0] for row in mine)
        rows.append({"out": letters, "means": [prior.mean for prior in four]})
    columns = {"families left out": "{out}", "`network`": "{means[0]:.3f}"}
    columns |= {"`constant_s`": "{means[1]:.4f}", "`growth`": "{means[2]:.5f}"}
    columns["`collective_noise`"] = "{means[3]:.2f}"
    by_family = ", ".join(f"{family[0]} {mean:.2f}" for family, mean in means.items())
    differ = f"by {noise.deviation:.2f}, systems of one family by {scale.deviation:.2f}."
    about = f"`collective_noise` by family: {by_family}. Families differ {differ}"
    return f"{table_of(rows, columns)}\n\n{about}"


def machine_of(family: str) -> str:
    """The machine and round in brackets at the end of a family's name, or else the whole name."""
    return family.rpartition("(")[2].replace("Eos-DFW", "Eos")


def short_table(folder: Folder) -> str:
    """Mean absolute errors of p95/p50 by number of consecutive steps of one run, in Markdown. Each
    pair of the smallest system of a family with another system has equal weight. Variances of steps
    and of kernels are added, which is nearly right. Stretches that `calibrate` refuses are left
    out. The prior of the noise of collectives is from families of other machines.
    """
    every = families(folder)
    splits, near = splits_of(every), linearised(every)
    errors: dict[int, list[tuple[float, float]]] = {number: [] for number in _NUMBERS}
    for family, systems in every.items():
        priors = priors_without(near, splits, family)
        for system, other in zip(systems[1:], splits[family][1:], strict=True):
            scales = (splits[family][0], other)
            for number, mine in errors.items():
                mine.append(_pair(systems[0].runs, scales, priors, number, system.tail))
    names = (*map(str, _NUMBERS[:-1]), "all of a run")
    means = ([f"{x:.5f}" for x in np.mean(mine, axis=0)] for mine in errors.values())
    cells = ((name, *each) for name, each in zip(names, means, strict=True))
    return table(("steps", "calibrated p95/p50 off by", "carried over p95/p50 off by"), cells)


def _pair(runs, scales, priors, number: int, measured: float) -> tuple[float, float]:
    """The mean errors of the calibrated law and of the run's own."""
    rng, found = np.random.default_rng(0), []
    for i in range(_STRETCHES):
        run = runs[i % len(runs)]
        first = rng.integers(0, max(len(run) - number, 0) + 1)
        steps = run[first : first + number]
        try:
            observed = observe_runs([steps])
        except ValueError:  # Refused, because slow steps come together and fill such a stretch.
            continue
        spread = spread_of(observed, priors)
        law = law_of_steps([observed], spread, priors)
        law = dataclasses.replace(law, sigma=_elsewhere(observed, spread, scales, priors))
        tails = np.array([tail_of(law.factors(_DRAWN)), tail_of(steps)])
        found.append(np.abs(tails - measured))
    ours, carried = np.mean(found, axis=0)
    return float(ours), float(carried)


def _elsewhere(observed, spread: float, scales: tuple[CoreSplit, CoreSplit], priors) -> float:
    """The spread of the core at the other scale."""
    own = {"alone": scaling.alone(observed, spread, priors), "num_steps": observed.num_steps}
    noise: Any = scaling.most_likely_noise([dataclasses.replace(scales[0], **own)], priors)
    now, then = (one.kernels + one.collectives * noise**2 for one in scales)
    less = min(1.0, spread**2 / now)  # As in `calibrate`, which makes kernels less noisy.
    return float(np.sqrt(spread**2 - less * now + less * then))
