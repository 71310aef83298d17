import dataclasses
from typing import Any

from .._files import shown
from .._misc import counted
from .._summary import plain
from ..data import layout_and_order
from . import _load
from ._options import LAW, Given, Output, argument, command
from ._values import check_out


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

    from ..calibration import epistemic
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
    result = {"job": job.name, "world_size": job.of.layout.world_size, **law.to_json(levels)}
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
    result["exposed_data_parallel_s"] = exposed = _exposed(program, options)
    lines = law.about_allocations()
    if exposed["mean"] > 0:
        lines.append(
            f"exposed communication of data parallelism: {exposed['mean']:.3g} s of a step on "
            f"average, p50 {exposed['p50']:.3g} s, p95 {exposed['p95']:.3g} s"
        )
    if given.epistemic and job.job is not None:
        future = epistemic(job.job, law)
        result["epistemic"] = future.to_json()
        lines.append(str(future))
    _load.tell_interrupted("steps", law, law.num_samples)
    lines += [] if per_gpu is None else per_gpu.lines()
    lines += [f"measured: {measured.get('source')}"] * bool(measured)
    lines.append(
        f"{counted(law.num_samples, 'step')} ({law.sampling} sampling, replicas: {law.replicas}); "
        f"set-up {law.compile_s:.1f} s, simulation {law.run_s:.1f} s "
        f"({result['samples_per_s']:,.0f} steps/s)"
    )
    table = dataclasses.replace(table, title="")
    what = layout_and_order(job.of.layout, job.of.schedule)
    title = f"{job.name}: {what}, {program.num_ops:,} ops"
    return Output(result, [title, table, "\n".join(lines)])


def _measured(job: Any, overrides: list[str]) -> dict[str, Any]:
    """The measured figures; none for a changed job, because the unchanged one was measured."""
    found = {} if job is None or job.measured is None or overrides else plain(job.measured)
    return {name: value for name, value in found.items() if value is not None}


def _exposed(program: Any, options: dict[str, Any]) -> dict[str, float]:
    """The exposed communication of data parallelism, in seconds of a step."""
    import numpy as np

    from ..analysis import exposed_data_parallel

    found = exposed_data_parallel(program, num_samples=options["num_samples"], key=options["key"])
    p50, p95 = np.quantile(found, (0.5, 0.95)).tolist()
    return {"mean": float(found.mean()), "p50": p50, "p95": p95}
