import dataclasses
from typing import Any

import numpy as np

from .._files import shown
from .._misc import counted
from .._summary import plain
from ..data import layout_and_order
from . import _load, _prism as prism
from ._options import LAW, Given, Output, command
from ._values import check_out


@command(LAW, csv=True)
def simulate(given: Given) -> Output:
    """Simulate a job and print the law of its step time.

    --epistemic  also print the law of a step of any such run, with the uncertainty of the model
    --out LAW.npz  a file to write the law to, for prism_jax.load_law

    example: prism-jax simulate gpt3-175b-h100-4096 --samples 100000 --set layout.dp=64 --quantiles
    0.999
    """
    check_out(given.out, ".npz")
    job = _load.load(given)
    if given.epistemic and job.modelled is None:
        raise ValueError(
            f"{shown(given.job)}: this has no model, and it is not known how far its level may be "
            "off; leave `--epistemic` out, or give a job with a model."
        )
    program, options = _load.compiled(given, job)
    drawn = {"sampling": given.sampling, "allocations": given.allocations}
    law = prism.engine.simulate(program, **drawn, **options)
    if given.out is not None:
        prism.law.save_law(law, given.out)
    # Of a job as it is shipped; a changed one was not measured.
    measured = None if job.job is None or given.overrides else job.job.measured
    levels = {**prism.law.QUANTILES, **given.quantiles}
    future = None if job.modelled is None else prism.calibration.epistemic(job.modelled, law)
    expected = None if future is None else future.intervals(levels)
    table = prism.law.law_table(law, levels, measured and measured.figures, expected)
    result = {"job": job.name, "world_size": job.of.layout.world_size, **law.to_json(levels)}
    if future is not None:
        result["prediction_interval_90"] = plain(expected)
        result["expected_error"] = _load.expected_error_json(future.error)
    if job.job is not None and job.job.kernels is not None:
        sources = job.job.kernels.sources
        result["kernels"] = [{"name": s.name, "stands_in_for": s.stands_in_for} for s in sources]
        result["notes"] = list(_load.all_notes(job.job))
    if measured is not None:
        known = plain(measured).items()
        result["measured"] = {name: value for name, value in known if value is not None}
        result["relative_error"] = {
            row["figure"]: row["predicted_s"] / row["measured_s"] - 1
            for row in table.rows
            if row["measured_s"] is not None
        }
    per_gpu = prism.prediction.throughput(job.job, law.mean)
    if per_gpu is not None:
        result["throughput"] = plain(per_gpu)
    result["exposed_data_parallel_s"] = _exposed(program, options)
    if given.epistemic and future is not None:
        result["epistemic"] = future.to_json()
    _load.tell_interrupted("steps", law, law.num_samples)
    what = layout_and_order(job.of.layout, job.of.schedule)
    title = f"{job.name}: {what}, {program.num_ops:,} ops"
    table = dataclasses.replace(table, title="")
    return Output(result, [title, table, "\n".join(_below(law, future, result, per_gpu))])


def _below(law: Any, future: Any, result: dict[str, Any], per_gpu: Any) -> list[str]:
    """What is said below the table: first what an interval means, last the simulation's noise."""
    lines = [] if future is None else [f"90 % of such runs: {future.error}"]
    if result.get("measured"):
        lines.append(f"measured: {result['measured'].get('source')}")
    lines += [] if per_gpu is None else per_gpu.lines()
    exposed = result["exposed_data_parallel_s"]
    if exposed["mean"] > 0:
        lines.append(
            f"exposed communication of data parallelism: {exposed['mean']:.3g} s of a step on "
            f"average, p95 {exposed['p95']:.3g} s"
        )
    lines += law.about_allocations()
    lines += [str(future)] * ("epistemic" in result)
    if future is not None:
        lines.append(prism.law.about_noise(law, future.intervals()))
    lines.append(
        f"{counted(law.num_samples, 'step')} ({law.sampling} sampling, replicas: {law.replicas}); "
        f"set-up {law.compile_s:.1f} s, simulation {law.run_s:.1f} s "
        f"({result['samples_per_s']:,.0f} steps/s)"
    )
    return lines


def _exposed(program: Any, options: dict[str, Any]) -> dict[str, float]:
    """The exposed communication of data parallelism, in seconds of a step."""
    options = {name: options[name] for name in ("num_samples", "key")}
    found = prism.analysis.exposed_data_parallel(program, **options)
    p50, p95 = np.quantile(found, (0.5, 0.95)).tolist()
    return {"mean": float(found.mean()), "p50": p50, "p95": p95}
