from .._summary import plain
from . import _load
from ._options import OBJECTIVE, SIMULATED, TOP, Given, Output, argument, command
from ._values import objective


@command(
    "gpt3-175b-h100-4096 --objective p95 --samples 8192",
    *SIMULATED,
    OBJECTIVE,
    TOP,
    argument(
        "--shapley NAME,NAME",
        "divide the joint gain of up to ten parts among them, such as gemm,rank,step",
        default="",
    ),
    csv=True,
)
def run(given: Given) -> Output:
    """Print on which kernels, stages, ranks and factors a figure of the step time depends."""
    job = _load.load(given)  # Bad input fails before JAX starts.

    from ..analysis import sensitivity

    wanted = objective(given.objective)
    program, options = _load.compiled(given, job)
    shapley = [name.strip() for name in given.shapley.split(",") if name.strip()]
    found = sensitivity(program, wanted, shapley=shapley, **options)
    shown, others = found.parts[: given.top], found.parts[given.top :]
    longest = max((part.mean.value for part in shown if part.mean), default=0.0)
    long = [part for part in others if part.mean and part.mean.value > longest]
    rows = [*shown, *long, *(part for part in others if part not in long)]
    table = found.summary().named(job.name, rows=rows, most=len(shown) + len(long))
    lines = [
        "mean, spread: what a part's latency and variability cost, to first order; gain: without "
        "its variability",
        f"all variability together: {found.whole_gain}; the sum of the gains of kernels, factors "
        f"and stalls: {found.sum_of_gains}",
        *(f"Shapley value of {name}: {value}" for name, value in found.shapley.items()),
        f"{found.num_samples:,} steps",
    ]
    return Output({"job": job.name, **plain(found)}, [table, "\n".join(lines)])
