from .._misc import counted, quoted
from .._summary import Column, Table, picked
from . import _load
from ._options import SIMULATED, TOP, Given, Output, argument, command


@command(
    "gpt3-175b-h100-4096 --of stages --band 0.94:0.96",
    *SIMULATED,
    argument(
        "--of",
        "print a table of ranks, stages or ops (ranks)",
        default="ranks",
        choices=("ranks", "stages", "ops"),
    ),
    argument(
        "--band A:B",
        "use only steps between two quantiles, such as 0.94:0.96 for p95 (0:1)",
        default="0:1",
    ),
    TOP,
    csv=True,
)
def run(given: Given) -> Output:
    """Print how often ranks, stages and ops are critical, and how much communication is exposed."""
    job = _load.load(given)  # Bad input fails before JAX starts.
    band = _band(given.band)

    import numpy as np

    from ..analysis import criticality

    program, options = _load.compiled(given, job)
    found = criticality(program, band=band, **options)
    frame = found.table(given.of)

    def levels(shares: np.ndarray) -> dict[str, float]:
        found = {f"p{level}": float(np.quantile(shares, level / 100)) for level in (5, 50, 95)}
        return {"mean": float(np.mean(shares)), **found}

    exposed = levels(found.exposed_communication)
    data_parallel = levels(found.exposed_data_parallel)
    result = {
        "job": job.name,
        "band": band,
        given.of: frame.to_dicts(),
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
    table = Table(columns, frame.to_dicts(), most=given.top)
    lines = [
        f"exposed communication{what}, of a step: "
        + ", ".join(f"{100 * x:.2f} % ({name})" for name, x in shares.items())
        for what, shares in (("", exposed), (" of data parallelism", data_parallel))
    ]
    seen = counted(round(found.num_replicas_seen), "replica")
    lines += [f"{counted(found.num_steps, 'step')}, decided by {seen}", *found.notes]
    return Output(result, [title, table, "\n".join(lines)])


def _band(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise ValueError(
            f"--band `{quoted(text)}` must be two quantiles, such as 0.94:0.96."
        ) from None
