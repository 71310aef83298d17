from .._files import shown
from .._summary import picked
from . import _load
from ._options import SIMULATED, Given, Output, argument, command
from ._values import check_out, quantile


@command(
    "gpt3-175b-h100-4096 --quantile 0.99 --out step.json",
    *SIMULATED,
    argument(
        "--quantile Q",
        "write the step at this quantile of the step time, such as 0.99 for p99 (0.5)",
        quantile,
        0.5,
    ),
    argument("--out FILE", "the JSON file to write", required=True),
)
def run(given: Given) -> Output:
    """Write a simulated step as a trace for Perfetto (ui.perfetto.dev)."""
    check_out(given.out, ".json")  # Bad input fails before JAX starts.
    job = _load.load(given)

    from ..analysis import sample_step
    from ..plot import save_chrome_trace

    program, options = _load.compiled(given, job)
    step = sample_step(program, quantile=given.quantile, **options)
    save_chrome_trace(step, given.out)
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
