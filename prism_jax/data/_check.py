"""Checks whether the parts of a job fit together, as far as this can be done without kernels."""

import msgspec

from .._misc import quoted
from ._hardware import Cluster
from ._job import Job, Layout, ScheduleConfig
from ._model import Model, check_model
from ._training import Training


# A graph of this many ops takes about a minute and some gigabytes to compile.
MAX_BLOCKS = 2_000_000


def check_job(job: Job, where: str) -> None:
    """Raises a `ValueError` of one sentence if parts of a job contradict each other."""
    layout, schedule = job.layout, job.schedule
    degrees = f"tp*cp*dp*pp = {layout.tp}*{layout.cp}*{layout.dp}*{layout.pp}"
    if job.world_size is not None and job.world_size != layout.world_size:
        raise ValueError(
            f"{where}: `world_size` is {job.world_size}, but `layout` has {degrees} = "
            f"{layout.world_size} ranks; change one of them."
        )
    stages = layout.pp * schedule.virtual_stages
    if stages * schedule.num_microbatches > MAX_BLOCKS:
        raise ValueError(
            f"{where}: the step has {stages} stages times {schedule.num_microbatches} "
            f"microbatches, more than the {MAX_BLOCKS:,} blocks that fit; use a smaller "
            "`schedule.num_microbatches`."
        )
    if schedule.layers_per_stage is not None:
        given = schedule.layers_per_stage
        if given != "auto" and len(given) != stages:
            raise ValueError(
                f"{where}: `schedule.layers_per_stage` has {len(given)} "
                f"entries, but there are {stages} stages (pp times virtual_stages); give one for "
                "each."
            )
        if schedule.embedding_counts_as_layer or schedule.head_counts_as_layer:
            raise ValueError(
                f"{where}: `schedule.layers_per_stage` gives the layers of all stages; leave out "
                "`embedding_counts_as_layer` and `head_counts_as_layer`."
            )
    given = [key for key in ("model", "cluster", "training") if getattr(job, key) is not None]
    missing = [key for key in ("model", "cluster", "training") if key not in given]
    if given and missing:
        raise ValueError(
            f"{where}: the key `{missing[0]}` is missing in the job `{job.name}`; a job with "
            f"`{given[0]}` needs `model`, `cluster` and `training`."
        )
    if job.model is not None:
        check_model(job.model, f"{where}, `model`")
    how = job.training
    sums = how is not None and how.zero >= 2 and how.accumulate_gradients
    if how is not None and sums and not how.overlap_grad_reduce:
        raise ValueError(
            f"{where}: `training.accumulate_gradients` reduce-scatters gradients beside "
            "the backwards that follow; leave `training.overlap_grad_reduce` true."
        )
    if job.cluster is not None and job.training is not None:
        if layout.world_size > job.cluster.num_devices:
            raise ValueError(
                f"{where}: `layout` has {degrees} = {layout.world_size} ranks, but the cluster "
                f"`{job.cluster.name}` only {job.cluster.num_devices} devices; use smaller "
                "degrees, or a larger `num_nodes`."
            )
        dtypes = job.cluster.device.peak_flop_per_s
        for dtype in (job.training.dtype, job.training.base_dtype):
            if dtype not in dtypes:
                raise ValueError(
                    f"{where}: `training.dtype` is {job.training.dtype!r}, but the device "
                    f"`{job.cluster.device.name}` has no `peak_flop_per_s` for {dtype!r}; it has "
                    f"{quoted(', '.join(sorted(dtypes))) or 'none'}."
                )


def check_parts(
    model: Model, layout: Layout, schedule: ScheduleConfig, training: Training, cluster: Cluster
) -> None:
    """Raises a `ValueError` of one sentence for parts that were made in code and would not be valid
    in a file, or that contradict each other.
    """
    for part in (model, layout, schedule, training, cluster):
        try:
            msgspec.convert(msgspec.to_builtins(part), type(part))
        except msgspec.ValidationError as error:
            raise ValueError(f"the {type(part).__name__} cannot be used: {error}.") from None
    job = Job(layout, schedule, model=model, training=training, cluster=cluster)
    check_job(job, "the program")


def check_cluster(cluster: Cluster, where: str) -> None:
    """Raises a `ValueError` of one sentence if the links of a cluster do not nest."""
    if not cluster.links:
        raise ValueError(f"{where}: the key `links` is empty; give at least one link.")
    names = [link.name for link in cluster.links]
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: `links` has two links with one name; rename one of them.")
    for inner, outer in zip(cluster.links, cluster.links[1:], strict=False):
        if outer.group <= inner.group:
            raise ValueError(
                f"{where}: the link `{outer.name}` joins {outer.group} ranks, not more than "
                f"`{inner.name}` before it ({inner.group}); list links innermost first."
            )
    if not cluster.device.peak_flop_per_s:
        raise ValueError(f"{where}: `peak_flop_per_s` is empty; give one dtype at least.")
    power = cluster.device.power
    if power is None:
        return
    for name in ("limit_w", "rated_w", "gemm_w", "attention_w", "moving_w"):
        if getattr(power, name) <= power.static_w:
            raise ValueError(
                f"{where}: `power.{name}` is {getattr(power, name):g} W, not more than the "
                f"{power.static_w:g} W that the device draws at any clock (`static_w`); raise it."
            )
