"""What variability costs: of each part, down to a target, and within a budget."""

from .._summary import Column, Table, plain
from . import _load, _prism as prism
from ._options import OBJECTIVE, REQUIRED, SIMULATED, TOP, Given, Output, command
from ._values import count, named_factor, objective


@command(SIMULATED, OBJECTIVE, TOP, how={"--shapley": (str, "")}, csv=True)
def sensitivity(given: Given) -> Output:
    """Print on which kernels, stages, ranks and factors a figure of the step time depends.

    --shapley NAME,NAME  divide the joint gain of up to ten parts among them, such as gemm,rank,step

    example: prism-jax sensitivity gpt3-175b-h100-4096 --objective p95 --samples 8192
    """
    job, wanted = _load.load(given), objective(given.objective)
    program, options = _load.compiled(given, job)
    shapley = [name.strip() for name in given.shapley.split(",") if name.strip()]
    found = prism.analysis.sensitivity(program, wanted, shapley=shapley, **options)
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


@command(SIMULATED, OBJECTIVE, how={"--part": REQUIRED, "--at": {**REQUIRED, "type": float}})
def target(given: Given) -> Output:
    """Print how much a part may vary for a figure of the step time to meet a target.

    --part PART  the part, such as all_gather
    --at X  the target, in the figure's unit

    example: prism-jax target gpt3-175b-h100-4096 --part rank --at 1.605
    """
    job, wanted = _load.load(given), objective(given.objective)
    program, options = _load.compiled(given, job)
    found = prism.analysis.target(program, wanted, given.part, given.at, **options)
    text = (
        f"{job.name}: with {found.factor} times its spread, `{given.part}` gives {wanted} = "
        f"{found.reached:.6g}; with its present spread {found.as_it_is:.6g}, without any "
        f"{found.without:.6g} ({found.num_samples:,} steps)"
    )
    about = {"job": job.name, "objective": str(wanted), "unit": wanted.unit}
    result = {**about, "part": given.part, **plain(found)}
    return Output(result, ["\n".join([text, *found.notes])])


@command(
    SIMULATED,
    OBJECTIVE,
    how={"--cost": REQUIRED, "--budget": {**REQUIRED, "type": float}, "--iterations": (count, 20)},
    csv=True,
)
def improve(given: Given) -> Output:
    """Find where to reduce variability within a budget, to lower a figure of the step time.

    --cost PART=COST...  the cost of removing all of a part's spread, such as all_gather=3 or rank=2
    --budget B  the budget, in the unit of the costs
    --iterations K  iterations of the descent (20)

    example: prism-jax improve gpt3-175b-h100-4096 --cost all_gather=3 --cost rank=2 --budget 2
    """
    job = _load.load(given)
    costs = dict(named_factor(text, "--cost", "all_gather=3", most=1e15) for text in given.cost)
    if len(costs) < len(given.cost):
        raise ValueError("--cost names a part twice; give one cost for each.")
    wanted = objective(given.objective)
    program, options = _load.compiled(given, job)
    options["num_iterations"] = given.iterations
    found = prism.analysis.improve(program, wanted, costs, given.budget, **options)
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
