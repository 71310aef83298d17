from .._summary import plain
from . import _load
from ._options import OBJECTIVE, SIMULATED, Given, Output, argument, command
from ._values import objective


@command(
    "gpt3-175b-h100-4096 --part rank --at 1.605",
    *SIMULATED,
    OBJECTIVE,
    argument("--part PART", "the part, such as all_gather", required=True),
    argument("--at X", "the target, in the figure's unit", float, required=True),
)
def run(given: Given) -> Output:
    """Print how much a part may vary for a figure of the step time to meet a target."""
    job = _load.load(given)  # Bad input fails before JAX starts.

    from ..analysis import target

    wanted = objective(given.objective)
    program, options = _load.compiled(given, job)
    found = target(program, wanted, given.part, given.at, **options)
    text = (
        f"{job.name}: with {found.factor} times its spread, `{given.part}` gives {wanted} = "
        f"{found.reached:.6g}; with its present spread {found.as_it_is:.6g}, without any "
        f"{found.without:.6g} ({found.num_samples:,} steps)"
    )
    about = {"job": job.name, "objective": str(wanted), "unit": wanted.unit}
    result = {**about, "part": given.part, **plain(found)}
    return Output(result, ["\n".join([text, *found.notes])])
