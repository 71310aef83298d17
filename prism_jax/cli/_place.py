import numpy as np

from .._files import shown
from .._summary import picked
from . import _load, _prism as prism
from ._options import ALLOW_OOM, JOB, OBJECTIVE, RANDOM, Given, Output, command
from ._values import check_out, count, objective


# Each has a factor of its own.
_MOST_GPUS = 10_000_000


@command(JOB, OBJECTIVE, RANDOM, ALLOW_OOM, how={"--samples": count})
def place(given: Given) -> Output:
    """Assign nodes to pipeline ranks and replicas by their speed, to lower the step time.

    --factors FILE  how slow each GPU, or each node, is: a .csv or .parquet file with a column
        `factor`, and `gpu` or `node`; without a file, factors are drawn from the job's law
    --samples N  steps to simulate for each figure (4096, or at least 512 for large jobs)
    --out FILE  a .csv file to write the placement to

    example: prism-jax place gpt3-175b-h100-4096 --factors nodes.csv --out placement.csv
    """
    check_out(given.out, ".csv")
    job = _load.load(given)
    factors, of = None, None
    if given.factors is not None:
        factors, of = prism.trace.read_factors(given.factors)

    import jax

    wanted, name = objective(given.objective), shown(given.job)
    world_size = job.of.layout.world_size
    if world_size > _MOST_GPUS:
        raise ValueError(f"{name}: it has {world_size:,} GPUs; up to {_MOST_GPUS:,} can be placed.")
    program, options = _load.compiled(given, job)
    of_factors, options["key"] = jax.random.split(options["key"])
    if factors is None:
        rank = program.variability.rank
        if rank is None:
            raise ValueError(
                f"{name}: the GPUs of this job do not differ; give measured --factors."
            )
        factors = np.asarray(rank.from_normal(jax.random.normal(of_factors, (program.world_size,))))
    devices = job.devices_per_node
    expected = {"gpu": program.world_size, "node": program.world_size // devices}
    if of is not None and len(factors) != expected[of]:
        raise ValueError(
            f"{shown(given.factors or '')}: it has {len(factors)} rows by `{of}`; the job has "
            f"{expected['gpu']} GPUs in {expected['node']} nodes."
        )
    options |= {"devices_per_node": devices, "objective": wanted}
    found = prism.placement.place(program, factors, **options)
    lines = [f"{found.num_samples:,} steps"]
    if given.out is not None:
        found.table().write_csv(given.out)
        lines.append(f"the node for each place: {given.out}")
    figures = ("objective", "unit", "before", "after", "gain", "worst", "bound")
    result = picked(found, *figures, "num_samples", "num_placements")
    result |= {"job": job.name, "order": found.order.tolist()}
    return Output(result, [found.summary().named(job.name), "\n".join(lines)])
