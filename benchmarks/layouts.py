"""Where published layouts stand in a search for layouts: `python benchmarks/layouts.py`.

Each search has the model, machine, batch, precision and switches of a published job. All layouts
that divide evenly and fit the memory are ranked by the prediction without variability. With
`--samples`, the published layout and its possible rivals are also ranked by the mean and p95 of so
many steps. A layout whose predicted step is longer than the p95 of the published layout cannot rank
before it, so it is not simulated. If the published layout does not fit, the search ignores memory
and says so.
"""

import sys
from typing import Any

import jax


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from validation.published import FAMILIES, published
from validation.rows import DATA, words
from validation.tables import line, options, table


def _jobs() -> dict[str, Any]:
    """The shipped jobs and, if the shared data are there, those of other submissions."""
    shipped = words("assumed")["layouts"].items()
    jobs = {name: prism.load_job(job, changes) for name, (job, *changes) in shipped}
    rows = published(DATA) if DATA.is_dir() else ()
    others = (one for one in rows if one.table == FAMILIES and one.job is not None)
    return jobs | {f"MLPerf, {one.name}": one.job for one in others}


def _row(name: str, job: Any, num_samples: int) -> list[str]:
    """The rank of a job's layout among all layouts of its model, with its share of them: by
    prediction and, with a number of samples, by the mean and p95 of simulated steps.
    """
    own, fits = prism.predict(job).mean, prism.memory(job).fits
    keys: Any = {name: getattr(job, name) for name in ("training", "batch_size", "kernels")}
    keys["space"] = prism.LayoutSpace(zero=tuple({1: 1, job.training.zero: 1}))
    sizes = (job.model, job.cluster, job.layout.world_size)
    found = prism.enumerate_layouts(*sizes, any_memory=not fits, **keys)
    rivals = sorted(found, key=_schedule)
    seconds = [prism.predict(one).mean for one in rivals]

    def share(rank: int) -> str:
        return f"{rank} ({100 * rank / len(rivals):.1f} %)"

    note = "" if fits else " (with any memory, as the published layout does not fit)"
    cells = [name, f"{job.layout.world_size:,}", f"{len(rivals):,}{note}"]
    cells.append(share(1 + sum(one < own * (1 - 1e-9) for one in seconds)))
    if num_samples:  # With common random numbers.
        options: dict[str, Any] = {"num_samples": num_samples, "key": jax.random.key(0)}
        p95 = prism.rank_layouts([job], **options).best.p95.value
        near = [one for one, s in zip(rivals, seconds, strict=True) if s < p95]
        others = [one for one in near if _what(one) != _what(job)]
        found = prism.rank_layouts([job, *others], top=len(near) + 1, **options)
        (mine,) = (one for one in found.layouts if one.job is job)
        cells += [str(mine.rank_by_mean), share(mine.rank)]
        cells += [f"{one.p95.value:.4g} s" for one in (mine, found.best)]
    return cells


def _what(job: Any) -> tuple:
    return job.layout, job.schedule, job.training


def _schedule(job: Any) -> tuple:
    one = job.schedule
    return job.layout.pp, one.kind, one.virtual_stages, one.num_microbatches


def main() -> None:
    samples, only = (0, "steps of each layout (none)"), ("", "those with this in their names")
    given = options(__doc__, samples=samples, only=only)
    header = ["published run", "GPUs", "layouts that fit", "rank by prediction"]
    if given.samples:
        header += ["rank by mean", "rank by p95", "p95, published layout", "p95, best layout"]
    print(table(header, []), flush=True)
    for name, job in _jobs().items():
        if given.only in name:
            print(line(_row(name, job, given.samples)), flush=True)


if __name__ == "__main__":
    main()
