from .._summary import Column, Table, plain
from . import _load
from ._options import OBJECTIVE, SIMULATED, Given, Output, argument, command, repeated
from ._values import count, named_factor, objective


@command(
    "gpt3-175b-h100-4096 --cost all_gather=3 --cost rank=2 --budget 2",
    *SIMULATED,
    OBJECTIVE,
    repeated(
        "--cost PART=COST",
        "the cost of removing all of a part's spread, such as all_gather=3 or rank=2",
        required=True,
    ),
    argument("--budget B", "the budget, in the unit of the costs", float, required=True),
    argument("--iterations K", "iterations of the descent (20)", count, 20),
    csv=True,
)
def run(given: Given) -> Output:
    """Find where to reduce variability within a budget, to lower a figure of the step time."""
    job = _load.load(given)  # Bad input fails before JAX starts.
    costs = dict(named_factor(text, "--cost", "all_gather=3", most=1e15) for text in given.cost)
    if len(costs) < len(given.cost):
        raise ValueError("--cost names a part twice; give one cost for each.")

    from ..analysis import improve

    wanted = objective(given.objective)
    program, options = _load.compiled(given, job)
    iterations = given.iterations
    found = improve(program, wanted, costs, given.budget, num_iterations=iterations, **options)
    parts = [{"part": name, "share": share} for name, share in found.removed.items()]
    unit = "" if found.unit == "1" else f" {found.unit}"
    lines = [
        f"as it is {found.before}{unit}, improved {found.after}{unit}, gain {found.gain}{unit}",
        f"{found.num_samples:,} steps for each figure, {len(found.path) - 2} iterations",
        *found.notes,
    ]
    title = f"{job.name}: {found.objective}, with {found.spent:.4g} spent"
    shares = (Column("part"), Column("share of its spread to remove", "share", ".3f"))
    table = Table(shares, sorted(parts, key=lambda row: -row["share"]), most=None)
    return Output({"job": job.name, **plain(found)}, [title, table, "\n".join(lines)])
