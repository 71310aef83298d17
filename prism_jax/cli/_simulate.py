"""`prism-jax simulate`: the law of a job's step time, beside measured figures."""

import argparse
import math
import sys
from typing import Any

import msgspec

from .._files import shown
from .._misc import counted
from ._arguments import add_job_arguments, check_out, count, quantiles
from ._json import plain


HELP = "simulate a job and print the law of its step time"

_RUN_STEPS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_law_arguments(parser)
    parser.add_argument(
        "--out", metavar="LAW.npz", help="a file to write the law to, for prism_jax.load_law"
    )


def add_law_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for which job to simulate, how, and what to print of its law."""
    add_job_arguments(parser)
    parser.add_argument(
        "--sampling",
        choices=("auto", "plain", "importance", "sobol"),
        default="auto",
        help="how samples of a replica are drawn: importance for tails, sobol for means (auto)",
    )

    parser.add_argument(
        "--allocations",
        type=count,
        metavar="K",
        help="divide the steps among K sets of GPUs, and print how much they differ (by default, "
        "GPUs are drawn anew for each step)",
    )
    parser.add_argument(
        "--epistemic",
        action="store_true",
        help="also print the law with the uncertainty of the model: of the level and the spread of "
        "a run, from its calibration or from the errors of earlier predictions",
    )
    parser.add_argument(
        "--quantiles",
        type=quantiles,
        default={},
        metavar="Q,Q",
        help="further quantiles, such as 0.999 (0.05, 0.5, 0.95 and 0.99 are always printed)",
    )


def check_epistemic(arguments: argparse.Namespace, job: Any) -> None:
    """Raises a `ValueError` for `--epistemic` with a profile."""
    if arguments.epistemic and job.job is None:
        raise ValueError(
            f"{shown(arguments.job)}: this is a profile, and the uncertainty of its level is not "
            "known; leave `--epistemic` out, or give a job."
        )


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    check_out(arguments.out, ".npz")  # Bad input fails before JAX starts.
    job = load(arguments)
    check_epistemic(arguments, job)

    from ..engine import simulate
    from ..law import QUANTILES, save_law
    from ..prediction import throughput

    program, options = compiled(arguments, job)
    law = simulate(
        program, sampling=arguments.sampling, allocations=arguments.allocations, **options
    )
    measured = _measured(job.job, arguments.overrides)
    if arguments.out is not None:
        save_law(law, arguments.out)
    result = _result(job, law, measured, {**QUANTILES, **arguments.quantiles})
    per_gpu = throughput(job.job, law.mean)
    if per_gpu is not None:
        result |= {"throughput": plain(msgspec.structs.asdict(per_gpu))}
    result["exposed_data_parallel_s"] = _exposed(program, options)
    if arguments.epistemic:
        result["epistemic"] = _epistemic(job, law)
    if law.interrupted:
        print(
            f"prism-jax: interrupted after {law.num_samples:,} of {law.requested:,} steps; the law "
            "has only these steps.",
            file=sys.stderr,
        )
    return result, _text(job, program, result, per_gpu)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each figure."""
    found, measured = result["step_time_s"], result.get("measured", {})
    return [
        {
            "figure": name.removesuffix("_interval"),
            "predicted_s": found[name.removesuffix("_interval")],
            "interval_s": found[name] or [None, None],
            "measured_s": measured.get(name.replace("_interval", "_s")),
        }
        for name in found
        if name.endswith("_interval")
    ]


def _exposed(program, options) -> dict[str, float]:
    """The law of the exposed data-parallel communication."""
    import numpy as np

    from ..analysis import exposed_data_parallel

    found = exposed_data_parallel(program, num_samples=options["num_samples"], key=options["key"])
    return {
        "mean": float(found.mean()),
        **{f"p{level}": float(np.quantile(found, level / 100)) for level in (50, 95)},
    }


def _epistemic(job, law) -> dict[str, Any]:
    """The law of a step of a future run."""
    from ..calibration import epistemic
    from ..law import QUANTILES

    found = epistemic(job.job, law)
    return {
        "level_std": found.level,
        "spread_std": found.spread,
        **{name: found.quantile(q) for name, q in QUANTILES.items()},
        "p50_interval_90": list(found.interval(0.5)),
        "p95_interval_90": list(found.interval(0.95)),
        "quantiles": [[i / 200, found.quantile(i / 200)] for i in range(1, 200)],
    }


def _measured(job, overrides) -> dict[str, Any] | None:
    """The measured figures; `None` for a changed job, because the unchanged one was measured."""
    if job is None or job.measured is None or overrides:
        return None
    fields = {k: getattr(job.measured, k) for k in job.measured.__struct_fields__}
    return {k: v for k, v in fields.items() if v is not None}


def _result(job, law, measured, levels: dict[str, float]) -> dict[str, Any]:
    from ..law import figures
    from ._load import all_notes

    step_time: dict[str, Any] = {}
    found, unknown = figures(law, quantiles=levels), {}
    for name, (value, interval) in found.items():
        step_time[name] = value
        known = not any(math.isnan(x) for x in interval)
        step_time[f"{name}_interval"] = list(interval) if known else None
        if not known:
            unknown[name] = law.why_unknown(levels.get(name))
    step_time["confidence_level"] = 0.95
    step_time["quantiles"] = [[i / 200, law.quantile(i / 200)] for i in range(1, 200)]
    result = {
        "job": job.name,
        "world_size": job.layout.world_size,
        "step_time_s": step_time,
        "num_samples": law.num_samples,
        "sampling": law.sampling,
        "replicas": law.replicas,
        "effective_samples": law.effective_samples,
        "requested_samples": law.requested,
        "compile_s": law.compile_s,
        "run_s": law.run_s,
        "samples_per_s": law.num_samples / max(law.run_s, 1e-9),
    }
    if law.allocations is not None and len(law.allocations.means) > 1:
        result["allocations"] = {
            "means_s": list(law.allocations.means),
            "std_within_s": law.allocations.std,
            "run_steps": _RUN_STEPS,
            "run_mean_std_s": law.run_mean_std(_RUN_STEPS),
        }
    if job.job is not None and job.job.kernels is not None:
        sources = job.job.kernels.sources
        result["kernels"] = [{"name": s.name, "stands_in_for": s.stands_in_for} for s in sources]
        result["notes"] = list(all_notes(job.job))
    if unknown:
        result["unknown_because"] = unknown
    if measured:
        result["measured"] = measured
        result["relative_error"] = {
            name: step_time[name] / measured[f"{name}_s"] - 1
            for name in found
            if f"{name}_s" in measured
        }
    return result


def _text(job, program, result, per_gpu) -> str:
    layout = job.layout
    degrees = ", ".join(
        f"{name} {value}"
        for name in ("tp", "pp", "dp", "cp", "ep")
        if (value := getattr(layout, name)) > 1
    )
    lines = [
        f"{job.name}: {layout.world_size:,} GPU{'s' * (layout.world_size > 1)}"
        f"{f' ({degrees})' if degrees else ''}, {job.schedule.kind}, "
        f"{counted(job.schedule.num_microbatches, 'microbatch', 'es')}, {program.num_ops:,} ops",
        "",
    ]
    measured, step_time = result.get("measured"), result["step_time_s"]
    header = f"{'step time':<10} {'predicted':>12}   {'95 % interval':^23}"
    lines.append(header + (f" {'measured':>12} {'error':>9}" if measured else ""))
    for row in rows(result):
        name, interval = row["figure"], step_time[f"{row['figure']}_interval"]
        between = f"{interval[0]:.5g} .. {interval[1]:.5g} s" if interval else "unknown*"
        line = f"{name:<10} {step_time[name]:>10.5g} s   {between:^23}"
        if measured and f"{name}_s" in measured:
            error = 100 * result["relative_error"][name]
            line += f" {measured[f'{name}_s']:>10.5g} s {error:>+7.2f} %"
        lines.append(line.rstrip())
    lines.append("")
    if "allocations" in result:
        found = result["allocations"]
        lines.append(
            f"{len(found['means_s'])} sets of GPUs: on one set, the standard deviation of steps is "
            f"{found['std_within_s']:.3g} s; between sets, that of the mean of {_RUN_STEPS:,} "
            f"independent steps is {found['run_mean_std_s']:.3g} s"
        )
    found = result["exposed_data_parallel_s"]
    if found["mean"] > 0:
        lines.append(
            f"exposed communication of data parallelism: {found['mean']:.3g} s of a step on "
            f"average, p50 {found['p50']:.3g} s, p95 {found['p95']:.3g} s"
        )
    if "epistemic" in result:
        found = result["epistemic"]
        low, high = found["p95_interval_90"]
        lines.append(
            f"with the uncertainty of the model (--epistemic): 90 % of steps take {found['p5']:.5g}"
            f" .. {found['p95']:.5g} s; the p50 of a run has a standard deviation of "
            f"{100 * found['level_std']:.2g} %, and the 90 % interval of its p95 is {low:.5g} .. "
            f"{high:.5g} s"
        )
    lines += [f"* {name}: {why}" for name, why in result.get("unknown_because", {}).items()]
    if per_gpu is not None:
        lines += per_gpu.lines()
    if measured:
        lines.append(f"measured: {measured['source']}")
    lines.append(
        f"{counted(result['num_samples'], 'step')} ({result['sampling']} sampling, replicas: "
        f"{result['replicas']}); set-up {result['compile_s']:.1f} s, simulation "
        f"{result['run_s']:.1f} s ({result['samples_per_s']:,.0f} steps/s)"
    )
    return "\n".join(lines)
