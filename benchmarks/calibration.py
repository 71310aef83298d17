"""How well runs at some scales of a job predict another scale, on MLPerf Training logs.

    python benchmarks/calibration.py            # tables in Markdown
    python benchmarks/calibration.py --priors   # the priors that the families imply
    python benchmarks/calibration.py --level    # that of jobs that are not calibrated
    python benchmarks/calibration.py --levels   # published steps with other such levels
    python benchmarks/calibration.py --short    # the tail after few steps
    python benchmarks/calibration.py --systems  # the tail of a system that was not measured
    python benchmarks/calibration.py --sites    # by how much sites of one machine differ

The families are those of `scaling_families.csv` and two more of the logs. Each is calibrated on its
smallest system, or on all systems but one. The priors are fitted without the families of the same
machine. Two simple predictions are printed beside the result: a line through two scales (seconds by
microbatches), and the law of the small run relative to its median, carried over.
"""

import json
import sys
from typing import Any

import jax
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from prism_jax.calibration import epistemic
from prism_jax.calibration._observe import core_spread
from validation.families import calibrated_to, families
from validation.fleet import gpus_text, networks_text
from validation.growth import level_text, variants_text
from validation.priors import linearised, priors_text, priors_without, short_table, splits_of
from validation.rows import DATA, MEASUREMENTS
from validation.sites import sites_text
from validation.tables import Folder, Row, Rows, cells, options, percent, table_of, use_all_cores
from validation.tails import systems_text


_SAMPLES = 32_768
_LEVELS = (np.arange(4000) + 0.5) / 4000


def rows(folder: Folder) -> list[Row]:
    """A row for each predicted system and the systems that it is predicted from."""
    every, found = families(folder), []
    near, splits = linearised(every), splits_of(every)
    for family, systems in every.items():
        priors = priors_without(near, splits, family)
        sources = [(systems[:1], systems[1:])]
        if len(systems) > 2:
            sources += [([s for s in systems if s is not one], [one]) for one in systems]
        for known, wanted in sources:
            found += _predicted(family, known, wanted, priors)
    return found


def _predicted(family, known, wanted, priors) -> Rows:
    jobs: Any = calibrated_to(known, wanted, source="MLPerf Training logs", priors=priors)
    for system, job in zip(wanted, jobs, strict=True):
        program = prism.compile_job(job)
        law = prism.simulate(program, num_samples=_SAMPLES, key=jax.random.key(0))
        wide = epistemic(job, law)
        low, median, high = (float(law.quantile(q)) for q in (0.05, 0.5, 0.95))
        aligned = [run * median / np.median(run) for run in system.runs]
        core = np.median([core_spread(run) for run in system.runs])
        line = _line(known, system) / system.median - 1 if len(known) > 1 else None
        print(f"{family}: {system.name}", file=sys.stderr, flush=True)
        row: Row = {"family": family, "gpus": job.layout.world_size}
        row["from"] = [one.job.layout.world_size for one in known]
        row |= {"p50_error": median / system.median - 1, "line_error": line}
        row |= {"p95_p50": high / median, "measured_p95_p50": system.tail}
        row["carried_p95_p50"] = known[0].tail
        row["core_ratio"] = core_spread(np.asarray(law.quantile(_LEVELS))) / core
        row |= {"level_std": wide.error.std, "within_90": _within(system.runs, low, high)}
        row["aligned_within_90"] = _within(aligned, low, high)
        row["epistemic_within_90"] = _within(system.runs, wide.quantile(0.05), wide.quantile(0.95))
        yield row


def _line(known, system) -> float:
    """Seconds by microbatches: a line through the two nearest scales."""
    at = system.job.schedule.num_microbatches
    nearest = sorted(known, key=lambda one: abs(np.log(one.job.schedule.num_microbatches / at)))
    numbers = [one.job.schedule.num_microbatches for one in nearest[:2]]
    if numbers[0] == numbers[1]:
        return nearest[0].median
    return float(np.polyval(np.polyfit(numbers, [one.median for one in nearest[:2]], 1), at))


def _within(runs, low: float, high: float) -> float:
    return float(np.mean([np.mean((run >= low) & (run <= high)) for run in runs]))


_COLUMNS = {"family": "{family}", "calibrated to (GPUs)": "{known}", "predicted (GPUs)": "{gpus:,}"}
_COLUMNS |= {"p50": "{p50_error:+.2%}", "p50 of the line": "{line}", "p95/p50": "{p95_p50:.4f}"}
_COLUMNS["p95/p50 measured"] = "{measured_p95_p50:.4f}"
_COLUMNS |= {"p95/p50 carried over": "{carried_p95_p50:.4f}", "core": "x {core_ratio:.2f}"}
_COLUMNS |= {"steps in 90 %": "{within_90:.0%}", "with equal medians": "{aligned_within_90:.0%}"}
_COLUMNS |= {"with --epistemic": "{epistemic_within_90:.0%}", "level +-": "{level_std:.2%}"}
_MEANS = "p50 off by {p50_error:.2%} on average; {line}p95/p50 by {p95_p50:.4f}, carried over by "
_MEANS += "{carried_p95_p50:.4f}; 90 % intervals hold {within_90:.0%} of steps, with --epistemic "
_MEANS += "{epistemic_within_90:.0%}"


def table_of_scales(found: list[Row]) -> str:
    """In Markdown."""
    for row in found:
        row["known"] = " and ".join(f"{number:,}" for number in row["from"])
        row["line"] = "" if row["line_error"] is None else percent(row["line_error"], 2)
    lines = [table_of(found, _COLUMNS), "", "Mean absolute errors over the rows above:"]
    for name, some in (("one scale", 1), ("several", 2)):
        mine = [row for row in found if min(len(row["from"]), 2) == some]
        if mine:
            lines += ["", f"from {name}: {_means(mine)}"]
    return "\n".join(lines)


def _means(found: list[Row]) -> str:
    lines = [abs(row["line_error"]) for row in found if row["line_error"] is not None]
    names = ("within_90", "epistemic_within_90")
    means: Row = {key: np.mean([row[key] for row in found]) for key in names}
    means["p50_error"] = np.mean([abs(row["p50_error"]) for row in found])
    for key in ("p95_p50", "carried_p95_p50"):
        means[key] = np.mean([abs(row[key] - row["measured_p95_p50"]) for row in found])
    means["line"] = cells({"line": np.mean(lines)}, "the line by {line:.2%}; ")[0] if lines else ""
    return cells(means, _MEANS)[0]


def main() -> None:
    # Of each part, whether its folder is that of all data, what it is, and its text.
    parts = {"priors": (0, "the priors that the families imply", priors_text)}
    parts["level"] = (1, "that of jobs without calibration", level_text)
    parts["levels"] = (1, "means with other such levels", variants_text)
    parts["short"] = (0, "the tail after few steps", short_table)
    parts["systems"] = (1, "the tail of unmeasured systems", systems_text)
    parts["sites"] = (1, "sites of one machine", sites_text)
    parts["networks"] = (1, "the law of shared networks", networks_text)
    parts["gpus"] = (1, "the laws of GPUs of a fleet", gpus_text)
    keys: Any = {"dest": "text_of", "action": "store_const"}
    known: Any = {n: keys | {"const": (up, of), "help": t} for n, (up, t, of) in parts.items()}
    data = MEASUREMENTS | {"default": str(DATA / "mlperf")}
    given = options(__doc__, json=(False, "print one object of all scales"), data=data, **known)
    use_all_cores()
    if given.text_of:
        of_all, text_of = given.text_of
        print(text_of(given.data.parent if of_all else given.data))
        return
    found = rows(given.data)
    print(json.dumps({"calibration": found}) if given.json else table_of_scales(found))


if __name__ == "__main__":
    main()
