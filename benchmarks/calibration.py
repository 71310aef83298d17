"""How well runs at some scales of a job predict another scale, on MLPerf Training logs.

    python benchmarks/calibration.py            # tables in Markdown; --json for one JSON object
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

import numpy as np


ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data" / "mlperf"
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


_SAMPLES = 32_768
_LEVELS = (np.arange(4000) + 0.5) / 4000


def rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each predicted system and the systems that it is predicted from."""
    from benchmarks._families import families
    from benchmarks._priors import linearised, priors_without, splits_of

    every = families(folder)
    near, splits = linearised(every), splits_of(every)
    for family, systems in every.items():
        priors = priors_without(near, splits, family)
        sources = [(systems[:1], systems[1:])]
        if len(systems) > 2:
            sources += [([s for s in systems if s is not one], [one]) for one in systems]
        for known, wanted in sources:
            yield from _predicted(family, known, wanted, priors)


def _predicted(family, known, wanted, priors) -> Iterator[dict[str, Any]]:
    import jax
    import msgspec

    import prism_jax as prism
    from prism_jax.calibration import epistemic
    from prism_jax.calibration._observe import core_spread
    from prism_jax.data import apply_calibrated

    first = known[0]
    calibrated = prism.calibrate(
        first.job,
        first.runs,
        source="MLPerf Training logs",
        key=jax.random.key(0),
        others=[(system.job, system.runs) for system in known[1:]],
        priors=priors,
    ).calibrated
    assert calibrated is not None
    for system in wanted:
        kernels = apply_calibrated(system.job.kernels, calibrated, "calibrated")
        job = msgspec.structs.replace(system.job, calibrated=calibrated, kernels=kernels)
        program = prism.compile_job(job)
        law = prism.simulate(program, num_samples=_SAMPLES, key=jax.random.key(0))
        wide = epistemic(job, law)
        steps = np.asarray(law.quantile(_LEVELS))
        low, median, high = (float(law.quantile(q)) for q in (0.05, 0.5, 0.95))
        aligned = [run * median / np.median(run) for run in system.runs]
        ratios = [np.quantile(run, 0.95) / np.median(run) for run in system.runs]
        carried = [np.quantile(run, 0.95) / np.median(run) for run in first.runs]
        core = float(np.median([core_spread(run) for run in system.runs]))
        yield {
            "family": family,
            "system": system.name,
            "gpus": job.layout.world_size,
            "from": [one.job.layout.world_size for one in known],
            "p50_error": median / system.median - 1,
            "line_error": _line(known, system) / system.median - 1 if len(known) > 1 else None,
            "p95_p50": high / median,
            "measured_p95_p50": float(np.median(ratios)),
            "carried_p95_p50": float(np.median(carried)),
            "core_ratio": core_spread(steps) / core,
            "level_std": wide.error.std,
            "within_90": _within(system.runs, low, high),
            "aligned_within_90": _within(aligned, low, high),
            "epistemic_within_90": _within(system.runs, wide.quantile(0.05), wide.quantile(0.95)),
        }


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


def table(found: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("family", "calibrated to (GPUs)", "predicted (GPUs)", "p50", "p50 of the line")
    header += ("p95/p50", "p95/p50 measured", "p95/p50 carried over", "core", "steps in 90 %")
    header += ("with equal medians", "with --epistemic", "level +-")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in found:
        line = row["line_error"]
        cells = (
            row["family"],
            " and ".join(f"{number:,}" for number in row["from"]),
            f"{row['gpus']:,}",
            f"{100 * row['p50_error']:+.2f} %",
            "" if line is None else f"{100 * line:+.2f} %",
            f"{row['p95_p50']:.4f}",
            f"{row['measured_p95_p50']:.4f}",
            f"{row['carried_p95_p50']:.4f}",
            f"x {row['core_ratio']:.2f}",
            *(f"{100 * row[f'{k}within_90']:.0f} %" for k in ("", "aligned_", "epistemic_")),
            f"{100 * row['level_std']:.2f} %",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Mean absolute errors over the rows above:"]
    for name, some in (("one scale", 1), ("several", 2)):
        mine = [row for row in found if min(len(row["from"]), 2) == some]
        if mine:
            lines += ["", f"from {name}: " + _means(mine)]
    return "\n".join(lines)


def _means(found: list[dict[str, Any]]) -> str:
    def mean(values):
        return float(np.mean(list(values)))

    level = mean(abs(row["p50_error"]) for row in found)
    lines = [abs(row["line_error"]) for row in found if row["line_error"] is not None]
    tail = mean(abs(row["p95_p50"] - row["measured_p95_p50"]) for row in found)
    carried = mean(abs(row["carried_p95_p50"] - row["measured_p95_p50"]) for row in found)
    parts = [f"p50 off by {100 * level:.2f} % on average"]
    if lines:
        parts.append(f"the line by {100 * mean(lines):.2f} %")
    parts.append(f"p95/p50 by {tail:.4f}, carried over by {carried:.4f}")
    held = [100 * mean(row[f"{k}within_90"] for row in found) for k in ("", "epistemic_")]
    parts.append(f"90 % intervals hold {held[0]:.0f} % of steps, with --epistemic {held[1]:.0f} %")
    return "; ".join(parts)


def priors_text(folder: pathlib.Path) -> str:
    """The priors that all families imply, and those without the families of one machine."""
    from benchmarks._families import families
    from benchmarks._priors import linearised, machine_of, noises, priors_without, splits_of

    every = families(folder)
    near, splits = linearised(every), splits_of(every)
    means, noise, scale = noises(splits)
    header = ("families left out", "`network`", "`constant_s`", "`growth`", "`collective_noise`")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    network, constant, growth = near[0]
    lines.append(f"| none | {network:.3f} | {constant:.4f} | {growth:.5f} | {noise.mean:.2f} |")
    machines: dict[str, list[str]] = {}
    for family in every:
        machines.setdefault(machine_of(family), []).append(family)
    for mine in machines.values():
        one = priors_without(near, splits, mine[0])
        cells = f"{one.network.mean:.3f} | {one.constant_s.mean:.4f} | {one.growth.mean:.5f}"
        letters = ", ".join(family[0] for family in mine)
        lines.append(f"| {letters} | {cells} | {one.collective_noise.mean:.2f} |")
    by_family = ", ".join(f"{family[0]} {mean:.2f}" for family, mean in means.items())
    return "\n".join(
        [
            *lines,
            "",
            f"`collective_noise` by family: {by_family}. Families differ by "
            f"{noise.deviation:.2f}, systems of one family by {scale.deviation:.2f}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Predictions of other scales, on MLPerf logs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--priors", action="store_true", help="the priors that the families imply")
    parser.add_argument("--level", action="store_true", help="that of jobs without calibration")
    parser.add_argument("--levels", action="store_true", help="means with other such levels")
    parser.add_argument("--short", action="store_true", help="the tail after few steps")
    parser.add_argument("--systems", action="store_true", help="the tail of unmeasured systems")
    parser.add_argument("--data", type=pathlib.Path, default=SHARED, help="the measurements")
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        parser.error(f"there is no folder {arguments.data}; name its own with --data")

    import jax

    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    if arguments.priors:
        print(priors_text(arguments.data))
        return
    if arguments.level:
        from benchmarks._level import level_text

        print(level_text(arguments.data.resolve().parent))
        return
    if arguments.levels:
        from benchmarks._levels import variants_text

        print(variants_text(arguments.data.resolve().parent))
        return
    if arguments.systems:
        from benchmarks._tails import laws_table, system_rows, system_table

        every = arguments.data.parent
        print(system_table(system_rows(every)), laws_table(every), sep="\n\n")
        return
    if arguments.short:
        from benchmarks._short_runs import short_table

        print(short_table(arguments.data))
        return
    found = []
    for row in rows(arguments.data):
        found.append(row)
        print(f"{row['system']} from {row['from']}", file=sys.stderr, flush=True)
    print(json.dumps({"calibration": found}) if arguments.json else table(found))


if __name__ == "__main__":
    main()
