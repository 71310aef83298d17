"""Which op waits for which: how often each is critical, and one step as a trace."""

import numpy as np

from .._files import shown
from .._misc import counted, quoted
from .._summary import Column, Table, picked
from . import _load, _prism as prism
from ._options import REQUIRED, SIMULATED, TOP, Given, Output, command
from ._values import check_out, quantile


@command(SIMULATED, TOP, how={"--of": (str, "ranks"), "--band": (str, "0:1")}, csv=True)
def criticality(given: Given) -> Output:
    """Print how often ranks, stages and ops are critical, and how much communication is exposed.

    --of {ranks,stages,ops}  print a table of ranks, stages or ops (ranks)
    --band A:B  use only steps between two quantiles, such as 0.94:0.96 for p95 (0:1)

    example: prism-jax criticality gpt3-175b-h100-4096 --of stages --band 0.94:0.96
    """
    job, band = _load.load(given), _band(given.band)
    program, options = _load.compiled(given, job)
    found = prism.analysis.criticality(program, band=band, **options)
    frame = found.table(given.of)
    rows = frame.to_dicts()
    exposed = _levels(found.exposed_communication)
    data_parallel = _levels(found.exposed_data_parallel)
    result = {
        "job": job.name,
        "band": band,
        given.of: rows,
        "exposed_communication": exposed,
        "exposed_data_parallel": data_parallel,
        **picked(found, "num_steps", "num_replicas_seen", "notes"),
    }
    title = f"{job.name}: {given.of} on the critical path"
    columns = [
        Column(name, error="standard_error") if name == "probability" else Column(name, form=".3g")
        for name in frame.columns
        if name != "standard_error"  # The digits say it.
        # Each step passes through all stages.
        and not (given.of == "stages" and name == "probability")
    ]
    lines = [
        f"exposed communication{what}, of a step: "
        + ", ".join(f"{100 * x:.2f} % ({name})" for name, x in shares.items())
        for what, shares in (("", exposed), (" of data parallelism", data_parallel))
    ]
    seen = counted(round(found.num_replicas_seen), "replica")
    lines += [f"{counted(found.num_steps, 'step')}, decided by {seen}", *found.notes]
    return Output(result, [title, Table(columns, rows, most=given.top), "\n".join(lines)])


def _levels(shares: np.ndarray) -> dict[str, float]:
    found = {f"p{level}": float(np.quantile(shares, level / 100)) for level in (5, 50, 95)}
    return {"mean": float(np.mean(shares)), **found}


def _band(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise ValueError(
            f"--band `{quoted(text)}` must be two quantiles, such as 0.94:0.96."
        ) from None


@command(SIMULATED, how={"--quantile": (quantile, 0.5), "--out": REQUIRED})
def timeline(given: Given) -> Output:
    """Write a simulated step as a trace for Perfetto (ui.perfetto.dev).

    --quantile Q  write the step at this quantile of the step time, such as 0.99 for p99 (0.5)
    --out FILE  the JSON file to write

    example: prism-jax timeline gpt3-175b-h100-4096 --quantile 0.99 --out step.json
    """
    check_out(given.out, ".json")
    job = _load.load(given)
    program, options = _load.compiled(given, job)
    step = prism.analysis.sample_step(program, quantile=given.quantile, **options)
    prism.plot.save_chrome_trace(step, given.out)
    result = {
        "job": job.name,
        "out": given.out,
        **picked(step, "quantile", "step_s", "num_ranks", "last_rank"),
        "num_ops": len(step.receivers),
        "critical_ops": len(step.path),
        "num_samples": given.samples,
    }
    of = f", the slowest of {step.num_replicas:,} replicas" if step.num_replicas > 1 else ""
    text = (
        f"{job.name}: a step of {step.step_s:.5g} s, the p{100 * step.quantile:g} of "
        f"{given.samples:,}{of}\n"
        f"{len(step.receivers):,} ops on {step.num_ranks} pipeline ranks, {len(step.path):,} of "
        f"them on the critical path, which ends on rank {step.last_rank}\n"
        f"written to {shown(given.out)}; open it in ui.perfetto.dev"
    )
    return Output(result, [text])
