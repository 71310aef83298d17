"""`prism-jax timeline`: one simulated step, op by op, for a viewer of traces."""

import argparse

from .._files import shown
from . import _load
from ._command import Output, argument, command
from ._options import SIMULATED
from ._values import check_out, quantile


@command(
    "write a simulated step as a trace for Perfetto (ui.perfetto.dev)",
    "gpt3-175b-h100-4096 --quantile 0.99 --out step.json",
    *SIMULATED,
    argument(
        "--quantile",
        "Q",
        "write the step at this quantile of the step time, such as 0.99 for p99 (0.5)",
        quantile,
        0.5,
    ),
    argument("--out", "FILE", "the JSON file to write", required=True),
)
def run(arguments: argparse.Namespace) -> Output:
    check_out(arguments.out, ".json")  # Bad input fails before JAX starts.
    job = _load.load(arguments)

    from ..analysis import sample_step
    from ..plot import save_chrome_trace

    program, options = _load.compiled(arguments, job)
    step = sample_step(program, quantile=arguments.quantile, **options)
    save_chrome_trace(step, arguments.out)
    result = {
        "job": job.name,
        "out": arguments.out,
        "quantile": step.quantile,
        "step_s": step.step_s,
        "num_ops": len(step.receivers),
        "num_ranks": step.num_ranks,
        "critical_ops": len(step.path),
        "last_rank": step.last_rank,
        "num_samples": arguments.samples,
    }
    of = f", the slowest of {step.num_replicas:,} replicas" if step.num_replicas > 1 else ""
    text = (
        f"{job.name}: a step of {step.step_s:.5g} s, the p{100 * step.quantile:g} of "
        f"{arguments.samples:,}{of}\n"
        f"{len(step.receivers):,} ops on {step.num_ranks} pipeline ranks, {len(step.path):,} of "
        f"them on the critical path, which ends on rank {step.last_rank}\n"
        f"written to {shown(arguments.out)}; open it in ui.perfetto.dev"
    )
    return Output(result, [text])
