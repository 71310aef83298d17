"""The level and the noise that families imply for steps at other scales.

All families share one `network`, `constant_s` and `growth`; each family has a factor on compute.
The noise of collectives is estimated for each family and for all families together.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import msgspec
import numpy as np

from prism_jax.calibration._calibrate import fit_level
from prism_jax.calibration._observe import law_of_steps, observe, spread_of
from prism_jax.calibration._scale import (
    Given,
    Split,
    alone,
    most_likely_noise,
    scale_of,
    splits_of as of_scales,
    without_calibration,
)
from prism_jax.data import Priors, load_priors
from prism_jax.data._priors import Prior
from prism_jax.prediction import constant_step, slope_of_level, with_level

from ._families import families
from ._tables import table


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


class Linear(NamedTuple):
    """A median as a function of the level, near some level: what is missing of its logarithm, and
    the slope of that of the step.
    """

    family: str
    missing: float
    slope: np.ndarray


def linearised(families: Mapping[str, Sequence]) -> tuple[np.ndarray, list[Linear]]:
    """The level that all families want, and their medians near it."""
    steps = {f: [constant_step(one.job) for one in systems] for f, systems in families.items()}
    compute = dict.fromkeys(families, 0.0)
    level, found = BEFORE[:, 0], []
    for _ in range(_ITERATIONS):
        found = []
        for family, systems in families.items():
            replicas = systems[0].job.layout.dp
            for one, seconds in zip(systems, steps[family], strict=True):
                kernels = without_calibration(one.job, "a family").kernels
                assert kernels is not None
                kernels = with_level(kernels, np.array([compute[family], *level]), replicas)
                missing = float(np.log(one.median / seconds(kernels)))
                found.append(Linear(family, missing, slope_of_level(seconds, kernels)))
        moved, computes = solved(found, level)
        level = moved
        compute = {family: compute[family] + change for family, change in computes.items()}
    return level, found


def solved(found: Sequence[Linear], level: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """The most likely level, and how much more each family's compute takes, as a logarithm."""
    names = list(dict.fromkeys(one.family for one in found))
    rows, wanted = [], []
    for one in found:
        of_compute = one.slope[0] * (np.array(names) == one.family)
        rows.append(np.array([*of_compute, *one.slope[1:]]) / _NOISE)
        wanted.append(one.missing / _NOISE)
    for i, (mean, deviation) in enumerate(BEFORE):
        rows.append(np.eye(len(names) + 3)[len(names) + i] / deviation)
        wanted.append((mean - level[i]) / deviation)
    change = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    moved = level + change[len(names) :]
    return moved, dict(zip(names, map(float, change), strict=False))


def splits_of(families: Mapping[str, Sequence]) -> dict[str, list[Split]]:
    """What makes the spread of the core of each system, at the level that it was measured at."""
    priors, found = load_priors(), {}
    for family, systems in families.items():
        replicas, splits = systems[0].job.layout.dp, []
        for one in systems:
            scale = scale_of(without_calibration(one.job, "a family"), one.runs)
            given = Given([scale], replicas, priors, jax.random.key(0), _SAMPLES)
            level = fit_level(given, np.array([one.median]), np.array([_NOISE]))
            splits += of_scales(given, given.kernels_at(level.values))
        found[family] = splits
    return found


def noises(splits: Mapping[str, list[Split]]) -> tuple[dict[str, float], Prior, Prior]:
    """Of each family the mean logarithm of the noise that makes all of what steps do not share; the
    law of it over families, less what systems of one family differ by; and that. Where the usual
    noise makes less than a hundredth of its variance, nothing is told.
    """
    usual = np.exp(2 * load_priors().collective_noise.mean)
    logs = {
        family: [np.log((one.alone - one.kernels) / one.collectives) / 2 for one in mine]
        for family, mine in splits.items()
        if all(one.collectives * usual > _TOLD * one.alone for one in mine)
    }
    means = {family: float(np.mean(mine)) for family, mine in logs.items()}
    degrees = sum(len(mine) - 1 for mine in logs.values())
    within = sum(np.var(mine) * len(mine) for mine in logs.values()) / degrees
    shared = np.mean([1 / len(mine) for mine in logs.values()])
    between = np.var(list(means.values()), ddof=1) - within * shared
    law = Prior(float(np.mean(list(means.values()))), float(np.sqrt(max(between, 0))), "families")
    return means, law, Prior(0.0, float(np.sqrt(within)), "families")


def priors_without(
    near: tuple[np.ndarray, list[Linear]], splits: Mapping[str, list[Split]], family: str
) -> Priors:
    """The shipped priors, with the means that all families say but those that share a machine."""
    level, found = near
    apart = {name: mine for name, mine in splits.items() if machine_of(name) != machine_of(family)}
    left = [one for one in found if machine_of(one.family) != machine_of(family)]
    network, constant, growth = solved(left, level)[0]
    shipped = load_priors()

    means = {"network": network, "constant_s": max(constant, 0.0), "growth": growth}
    means["collective_noise"] = noises(apart)[1].mean
    replace = msgspec.structs.replace
    moved = {name: replace(getattr(shipped, name), mean=float(x)) for name, x in means.items()}
    return replace(shipped, **moved)


def priors_text(folder: pathlib.Path) -> str:
    """The priors that all families imply, and those without the families of one machine."""
    every = families(folder)
    near, splits = linearised(every), splits_of(every)
    means, noise, scale = noises(splits)
    header = ("families left out", "`network`", "`constant_s`", "`growth`", "`collective_noise`")
    cells = [("none", *_shown([*near[0], noise.mean]))]
    machines: dict[str, list[str]] = {}
    for family in every:
        machines.setdefault(machine_of(family), []).append(family)
    for mine in machines.values():
        one = priors_without(near, splits, mine[0])
        four = one.network, one.constant_s, one.growth, one.collective_noise
        letters = ", ".join(family[0] for family in mine)
        cells.append((letters, *_shown([prior.mean for prior in four])))
    by_family = ", ".join(f"{family[0]} {mean:.2f}" for family, mean in means.items())
    return (
        f"{table(header, cells)}\n\n`collective_noise` by family: {by_family}. Families differ by "
        f"{noise.deviation:.2f}, systems of one family by {scale.deviation:.2f}."
    )


def _shown(values: Sequence[float]) -> list[str]:
    return [f"{x:.{places}f}" for x, places in zip(values, (3, 4, 5, 2), strict=True)]


def machine_of(family: str) -> str:
    """The machine and round in brackets at the end of a family's name, or else the whole name."""
    return family.rpartition("(")[2].replace("Eos-DFW", "Eos")


def short_table(folder: pathlib.Path) -> str:
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
            measured = float(np.median([_tail(run) for run in system.runs]))
            for number, mine in errors.items():
                scales = (splits[family][0], other)
                mine.append(_pair(systems[0].runs, scales, priors, number, measured))
    names = (*map(str, _NUMBERS[:-1]), "all of a run")
    means = ([f"{x:.5f}" for x in np.mean(mine, axis=0)] for mine in errors.values())
    cells = [(name, *each) for name, each in zip(names, means, strict=True)]
    return table(("steps", "calibrated p95/p50 off by", "carried over p95/p50 off by"), cells)


def _pair(runs, scales, priors, number: int, measured: float) -> tuple[float, float]:
    """The mean errors of the calibrated law and of the run's own."""
    rng, found = np.random.default_rng(0), []
    for i in range(_STRETCHES):
        run = runs[i % len(runs)]
        first = rng.integers(0, max(len(run) - number, 0) + 1)
        steps = run[first : first + number]
        try:
            observed = observe([steps])
        except ValueError:  # Refused, because slow steps come together and fill such a stretch.
            continue
        spread = spread_of(observed, priors)
        law = law_of_steps([observed], spread, priors)
        law = dataclasses.replace(law, sigma=_elsewhere(observed, spread, scales, priors))
        ours = _tail(law.factors(_DRAWN))
        found.append((abs(ours - measured), abs(_tail(steps) - measured)))
    ours, carried = np.mean(found, axis=0)
    return float(ours), float(carried)


def _elsewhere(observed, spread: float, scales: tuple[Split, Split], priors) -> float:
    """The spread of the core at the other scale."""
    here = dataclasses.replace(
        scales[0], alone=alone(observed, spread, priors), num_steps=observed.num_steps
    )
    noise = most_likely_noise([here], priors)
    assert noise is not None
    now, then = (one.kernels + one.collectives * noise**2 for one in scales)
    less = min(1.0, spread**2 / now)  # As in `calibrate`, which makes kernels less noisy.
    return float(np.sqrt(spread**2 - less * now + less * then))


def _tail(steps: np.ndarray) -> float:
    return float(np.quantile(steps, 0.95) / np.median(steps))
