import dataclasses
from collections.abc import Iterator
from typing import Any

from .._files import shown
from .._misc import counted
from .._summary import picked, plain
from . import _load
from ._options import LAW, Given, Output, argument, command
from ._values import check_out


_RUN_STEPS = 10_000


def check_epistemic(given: Given, job: _load.Loaded) -> None:
    """Raises a `ValueError` for `--epistemic` with a profile."""
    if given.epistemic and job.job is None:
        raise ValueError(
            f"{shown(given.job)}: this is a profile, and the uncertainty of its level is not "
            "known; leave `--epistemic` out, or give a job."
        )


@command(
    "gpt3-175b-h100-4096 --samples 100000 --set layout.dp=64 --quantiles 0.999",
    *LAW,
    argument("--out LAW.npz", "a file to write the law to, for prism_jax.load_law"),
    csv=True,
)
def run(given: Given) -> Output:
    """Simulate a job and print the law of its step time."""
    check_out(given.out, ".npz")  # Bad input fails before JAX starts.
    job = _load.load(given)
    check_epistemic(given, job)

    import numpy as np

    from ..analysis import exposed_data_parallel
    from ..engine import simulate
    from ..law import QUANTILES, save_law
    from ..prediction import throughput

    program, options = _load.compiled(given, job)
    law = simulate(program, sampling=given.sampling, allocations=given.allocations, **options)
    if given.out is not None:
        save_law(law, given.out)
    measured = _measured(job.job, given.overrides)
    levels = {**QUANTILES, **given.quantiles}
    table = law.summary(levels, job.job.measured.figures if measured else None)
    result = {"job": job.name, "world_size": job.of.layout.world_size, **_law(law, levels)}
    if job.job is not None and job.job.kernels is not None:
        sources = job.job.kernels.sources
        result["kernels"] = [{"name": s.name, "stands_in_for": s.stands_in_for} for s in sources]
        result["notes"] = list(_load.all_notes(job.job))
    if measured:
        result["measured"] = measured
        result["relative_error"] = {
            row["figure"]: row["predicted_s"] / row["measured_s"] - 1
            for row in table.rows
            if row["measured_s"] is not None
        }
    per_gpu = throughput(job.job, law.mean)
    if per_gpu is not None:
        result["throughput"] = plain(per_gpu)
    exposed = exposed_data_parallel(program, num_samples=given.samples, key=options["key"])
    p50, p95 = np.quantile(exposed, (0.5, 0.95)).tolist()
    result["exposed_data_parallel_s"] = {"mean": float(exposed.mean()), "p50": p50, "p95": p95}
    if given.epistemic:
        result["epistemic"] = _epistemic(job, law)
    _load.tell_interrupted("steps", law, law.num_samples)
    lines = [*_sentences(result), *([] if per_gpu is None else per_gpu.lines())]
    lines += [f"measured: {measured.get('source')}"] * bool(measured)
    lines.append(
        f"{counted(law.num_samples, 'step')} ({law.sampling} sampling, replicas: {law.replicas}); "
        f"set-up {law.compile_s:.1f} s, simulation {law.run_s:.1f} s "
        f"({result['samples_per_s']:,.0f} steps/s)"
    )
    table = dataclasses.replace(table, title="")
    return Output(result, [_title(job, program), table, "\n".join(lines)])


def _measured(job: Any, overrides: list[str]) -> dict[str, Any]:
    """The measured figures; none for a changed job, because the unchanged one was measured."""
    found = {} if job is None or job.measured is None or overrides else plain(job.measured)
    return {name: value for name, value in found.items() if value is not None}


def _law(law: Any, levels: dict[str, float]) -> dict[str, Any]:
    """A law as JSON."""
    from ..law import figures

    step_time, unknown = {}, {}
    for name, (value, interval) in figures(law, quantiles=levels).items():
        known = interval[0] == interval[0]
        step_time |= {name: value, f"{name}_interval": list(interval) if known else None}
        if not known:
            unknown[name] = law.why_unknown(levels.get(name))
    step_time["confidence_level"] = 0.95
    step_time["quantiles"] = [[i / 200, law.quantile(i / 200)] for i in range(1, 200)]
    names = ("num_samples", "sampling", "replicas", "effective_samples", "compile_s", "run_s")
    result = {"step_time_s": step_time, **picked(law, *names)}
    result["requested_samples"] = law.requested
    result["samples_per_s"] = law.num_samples / max(law.run_s, 1e-9)
    if law.allocations is not None and len(law.allocations.means) > 1:
        result["allocations"] = {
            "means_s": list(law.allocations.means),
            "std_within_s": law.allocations.std,
            "run_steps": _RUN_STEPS,
            "run_mean_std_s": law.run_mean_std(_RUN_STEPS),
        }
    return result | ({"unknown_because": unknown} if unknown else {})


def _epistemic(job: _load.Loaded, law: Any) -> dict[str, Any]:
    """The law of a step of a future run."""
    from ..fitting import epistemic
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


def _title(job: _load.Loaded, program: Any) -> str:
    layout, schedule = job.of.layout, job.of.schedule
    listed = {name: getattr(layout, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    degrees = ", ".join(f"{name} {value}" for name, value in listed.items() if value > 1)
    return (
        f"{job.name}: {counted(layout.world_size, 'GPU')}{f' ({degrees})' if degrees else ''}, "
        f"{schedule.kind}, {counted(schedule.num_microbatches, 'microbatch', 'es')}, "
        f"{program.num_ops:,} ops"
    )


def _sentences(result: dict[str, Any]) -> Iterator[str]:
    """What is known besides the figures."""
    if found := result.get("allocations"):
        yield (
            f"{len(found['means_s'])} sets of GPUs: on one set, the standard deviation of steps is "
            f"{found['std_within_s']:.3g} s; between sets, that of the mean of {_RUN_STEPS:,} "
            f"independent steps is {found['run_mean_std_s']:.3g} s"
        )
    found = result["exposed_data_parallel_s"]
    if found["mean"] > 0:
        yield (
            f"exposed communication of data parallelism: {found['mean']:.3g} s of a step on "
            f"average, p50 {found['p50']:.3g} s, p95 {found['p95']:.3g} s"
        )
    if found := result.get("epistemic"):
        low, high = found["p95_interval_90"]
        yield (
            f"with the uncertainty of the model (--epistemic): 90 % of steps take {found['p5']:.5g}"
            f" .. {found['p95']:.5g} s; the p50 of a run has a standard deviation of "
            f"{100 * found['level_std']:.2g} %, and the 90 % interval of its p95 is {low:.5g} .. "
            f"{high:.5g} s"
        )
