"""How well runs at some scales of a job predict another scale, on MLPerf Training logs.

    python benchmarks/calibration.py            # tables in Markdown
    python benchmarks/calibration.py --priors   # the priors that the families imply
    python benchmarks/calibration.py --level    # that of jobs that are not calibrated
    python benchmarks/calibration.py --levels   # published steps with other such levels
    python benchmarks/calibration.py --short    # the tail after few steps
    python benchmarks/calibration.py --systems  # the tail of a system that was not measured

The families are those of `scaling_families.csv` and two more of the logs. Each is calibrated on its
smallest system, or on all systems but one. The priors are fitted without the families of the same
machine. Two simple predictions are printed beside the result: a line through two scales (seconds by
microbatches), and the law of the small run relative to its median, carried over.
"""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import msgspec
import numpy as np


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
import prism_jax as prism
from benchmarks import _level, _priors, _tails
from benchmarks._families import families
from benchmarks._rows import DATA
from benchmarks._tables import percent, table
from prism_jax.calibration import epistemic
from prism_jax.calibration._observe import core_spread
from prism_jax.data import apply_calibrated


_SAMPLES = 32_768
_LEVELS = (np.arange(4000) + 0.5) / 4000
_HELD = ("within_90", "aligned_within_90", "epistemic_within_90")


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each predicted system and the systems that it is predicted from."""
    every, found = families(folder), []
    near, splits = _priors.linearised(every), _priors.splits_of(every)
    for family, systems in every.items():
        priors = _priors.priors_without(near, splits, family)
        sources = [(systems[:1], systems[1:])]
        if len(systems) > 2:
            sources += [([s for s in systems if s is not one], [one]) for one in systems]
        for known, wanted in sources:
            found += _predicted(family, known, wanted, priors)
    return found


def _predicted(family, known, wanted, priors) -> Iterator[dict[str, Any]]:
    first, *others = known
    calibrated = prism.calibrate(
        first.job,
        first.runs,
        source="MLPerf Training logs",
        key=jax.random.key(0),
        others=[(system.job, system.runs) for system in others],
        priors=priors,
    ).calibrated
    assert calibrated is not None
    for system in wanted:
        kernels = apply_calibrated(system.job.kernels, calibrated, "calibrated")
        job = msgspec.structs.replace(system.job, calibrated=calibrated, kernels=kernels)
        program = prism.compile_job(job)
        law = prism.simulate(program, num_samples=_SAMPLES, key=jax.random.key(0))
        wide = epistemic(job, law)
        low, median, high = (float(law.quantile(q)) for q in (0.05, 0.5, 0.95))
        aligned = [run * median / np.median(run) for run in system.runs]
        core = np.median([core_spread(run) for run in system.runs])
        around = wide.quantile(0.05), wide.quantile(0.95)
        print(f"{family}: {system.name}", file=sys.stderr, flush=True)
        yield {
            "family": family,
            "gpus": job.layout.world_size,
            "from": [one.job.layout.world_size for one in known],
            "p50_error": median / system.median - 1,
            "line_error": _line(known, system) / system.median - 1 if others else None,
            "p95_p50": high / median,
            "measured_p95_p50": _tail(system),
            "carried_p95_p50": _tail(first),
            "core_ratio": core_spread(np.asarray(law.quantile(_LEVELS))) / core,
            "level_std": wide.error.std,
            "within_90": _within(system.runs, low, high),
            "aligned_within_90": _within(aligned, low, high),
            "epistemic_within_90": _within(system.runs, *around),
        }


def _tail(system) -> float:
    return float(np.median([np.quantile(run, 0.95) / np.median(run) for run in system.runs]))


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


def table_of(found: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("family", "calibrated to (GPUs)", "predicted (GPUs)", "p50", "p50 of the line")
    header += ("p95/p50", "p95/p50 measured", "p95/p50 carried over", "core", "steps in 90 %")
    header += ("with equal medians", "with --epistemic", "level +-")
    cells = [
        (
            row["family"],
            " and ".join(f"{number:,}" for number in row["from"]),
            f"{row['gpus']:,}",
            percent(row["p50_error"], 2),
            "" if row["line_error"] is None else percent(row["line_error"], 2),
            *(f"{row[f'{k}p95_p50']:.4f}" for k in ("", "measured_", "carried_")),
            f"x {row['core_ratio']:.2f}",
            *(f"{100 * row[name]:.0f} %" for name in _HELD),
            f"{100 * row['level_std']:.2f} %",
        )
        for row in found
    ]
    lines = [table(header, cells), "", "Mean absolute errors over the rows above:"]
    for name, some in (("one scale", 1), ("several", 2)):
        mine = [row for row in found if min(len(row["from"]), 2) == some]
        if mine:
            lines += ["", f"from {name}: " + _means(mine)]
    return "\n".join(lines)


def _means(found: list[dict[str, Any]]) -> str:
    level = np.mean([abs(row["p50_error"]) for row in found])
    lines = [abs(row["line_error"]) for row in found if row["line_error"] is not None]
    tail, carried = (
        np.mean([abs(row[name] - row["measured_p95_p50"]) for row in found])
        for name in ("p95_p50", "carried_p95_p50")
    )
    held, _, wide = (100 * np.mean([row[name] for row in found]) for name in _HELD)
    parts = [f"p50 off by {100 * level:.2f} % on average"]
    if lines:
        parts.append(f"the line by {100 * np.mean(lines):.2f} %")
    parts.append(f"p95/p50 by {tail:.4f}, carried over by {carried:.4f}")
    parts.append(f"90 % intervals hold {held:.0f} % of steps, with --epistemic {wide:.0f} %")
    return "; ".join(parts)


def _of_systems(folder: pathlib.Path) -> str:
    every = _tails.system_rows(folder.parent)
    return f"{_tails.system_table(every)}\n\n{_tails.laws_table(folder.parent)}"


def main() -> None:
    parts = {
        "priors": ("the priors that the families imply", _priors.priors_text),
        "level": ("that of jobs without calibration", lambda at: _level.level_text(at.parent)),
        "levels": ("means with other such levels", lambda at: _level.variants_text(at.parent)),
        "short": ("the tail after few steps", _priors.short_table),
        "systems": ("the tail of unmeasured systems", _of_systems),
    }
    parser = argparse.ArgumentParser(description="Predictions of other scales, on MLPerf logs.")
    for name, (about, text_of) in parts.items():
        keys: Any = {"dest": "text_of", "action": "store_const"}
        parser.add_argument(f"--{name}", const=text_of, help=about, **keys)
    parser.add_argument("--json", action="store_true", help="print one JSON object of all scales")
    parser.add_argument(
        "--data", type=pathlib.Path, default=DATA / "mlperf", help="the measurements"
    )
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        parser.error(f"there is no folder {arguments.data}; name its own with --data")
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    folder = arguments.data.resolve()
    if arguments.text_of:
        print(arguments.text_of(folder))
        return
    found = rows(folder)
    print(json.dumps({"calibration": found}) if arguments.json else table_of(found))


if __name__ == "__main__":
    main()
