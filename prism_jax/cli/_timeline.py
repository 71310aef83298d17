"""`prism-jax timeline`: one simulated step, op by op, for a viewer of traces."""

import argparse
from typing import Any

from .._files import shown
from ._arguments import add_job_arguments, check_out, quantile


HELP = "write a simulated step as a trace for Perfetto (ui.perfetto.dev)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--quantile",
        type=quantile,
        default=0.5,
        metavar="Q",
        help="write the step at this quantile of the step time, such as 0.99 for p99 (0.5)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSON file to write")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    check_out(arguments.out, ".json")  # Bad input fails before JAX starts.
    job = load(arguments)

    from ..analysis import sample_step
    from ..plot import save_chrome_trace

    program, options = compiled(arguments, job)
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
    lines = [
        f"{job.name}: a step of {step.step_s:.5g} s, the p{100 * step.quantile:g} of "
        f"{arguments.samples:,}{of}",
        f"{result['num_ops']:,} ops on {step.num_ranks} pipeline ranks, {len(step.path):,} of them "
        f"on the critical path, which ends on rank {step.last_rank}",
        f"written to {shown(arguments.out)}; open it in ui.perfetto.dev",
    ]
    return result, "\n".join(lines)
