"""Checks of a job without its kernels: do its parts fit together, and are they plausible?"""

import itertools as it
from collections.abc import Iterator

import msgspec

from .._misc import plural, quoted
from ._hardware import Cluster
from ._job import Job, Layout, ScheduleConfig, balances
from ._load_kernels import links_without_table
from ._model import Model, check_model
from ._read import located
from ._training import Training


# A graph of this many ops takes about a minute and some gigabytes to compile.
MAX_BLOCKS = 2_000_000
_PARTS = ("model", "cluster", "training")

# Networks between nodes have up to 800 Gbit/s per device, 100e9 bytes/s; links within, 1.8e12.
_MOST_OF_A_NETWORK = 2e11
_MOST_OF_A_LINK = 4e12
_FACTORS = (0.7, 1.5)
# GPT-2 and GPT-3 have 50,257 tokens; models with more are mostly newer, with other defaults.
_WORDS_OF_GPT = 52_000
_DEFAULTS = ("activation", "position", "norm", "bias", "tied_embeddings")

# The smallest and the largest value of the devices and clusters in `hardware/`.
SHIPPED = {
    "memory_bytes": (1.6911e10, 3.09216e11),
    "memory_bandwidth_bytes_per_s": (6e11, 8e12),
    "peak_flop_per_s": (1.57e13, 1.5e16),
    "bandwidth_bytes_per_s": (1.5625e9, 9e11),
    "latency_s": (1e-6, 2e-5),
    "link_bytes_per_s": (2.78e10, 2.97e11),
    "memory_bytes_per_s": (5.12e10, 5.12e11),
}
# Values that are further off are refused: they are in another unit.
_OTHER_UNIT = 1e4
_UNITS = (3, 6, 9, 12, -3, -6, -9, -12)


def check_job(job: Job, where: str) -> None:
    """Raises a `ValueError` of one sentence if parts of a job contradict each other."""
    with located(where):
        _check_layout(job)
    if job.model is not None:
        with located(f"{where}, `model`"):
            check_model(job.model)
    if job.training is not None and job.cluster is not None:
        with located(where):
            _check_training(job, job.training, job.cluster)


def _check_layout(job: Job) -> None:
    layout, schedule, layers = job.layout, job.schedule, job.schedule.layers_per_stage
    if job.world_size is not None and job.world_size != layout.world_size:
        raise ValueError(
            f"`world_size` is {job.world_size}, but `layout` has {_ranks(layout)}; change one of "
            "them, or leave `layout.dp` out, and it follows."
        )
    stages = layout.pp * schedule.virtual_stages
    if stages * schedule.num_microbatches > MAX_BLOCKS:
        raise ValueError(
            f"stages times microbatches are {stages}*{schedule.num_microbatches}, more than the "
            f"{MAX_BLOCKS:,} blocks that fit; use a smaller `schedule.num_microbatches`."
        )
    if layers is not None and layers != "auto" and len(layers) != stages:
        raise ValueError(
            f"`schedule.layers_per_stage` has {len(layers)} entries, but there are {stages} stages "
            "(pp times virtual_stages); give one for each."
        )
    if layers is not None and (schedule.embedding_counts_as_layer or schedule.head_counts_as_layer):
        raise ValueError(
            "`schedule.layers_per_stage` gives the layers of all stages; leave out "
            "`embedding_counts_as_layer` and `head_counts_as_layer`."
        )
    missing = [key for key in _PARTS if getattr(job, key) is None]
    if 0 < len(missing) < len(_PARTS):
        first = next(key for key in _PARTS if key not in missing)
        raise ValueError(
            f"the key `{missing[0]}` is missing in the job `{job.name}`; a job with `{first}` "
            "needs `model`, `cluster` and `training`."
        )


def _check_training(job: Job, training: Training, cluster: Cluster) -> None:
    if training.global_batch_size not in (None, job.batch_size):
        number, size = job.schedule.num_microbatches, training.microbatch_size
        raise ValueError(
            f"`training.global_batch_size` is {training.global_batch_size}, but dp*num_microbatches"
            f"*microbatch_size = {job.layout.dp}*{number}*{size} = {job.batch_size}; change one of "
            "them, or leave `schedule.num_microbatches` out, and it follows."
        )
    sums = training.zero >= 2 and training.accumulate_gradients
    if sums and not training.overlap_grad_reduce:
        raise ValueError(
            "`training.accumulate_gradients` reduce-scatters gradients beside the backwards that "
            "follow; leave `training.overlap_grad_reduce` true."
        )
    if training.in_float32:
        known = {
            "attention": ("flash", "unfused"),
            "weights": ("fp32", "copied"),
            "gather_dtype": ("fp32", None),
        }
        for key, values in known.items():
            if (value := getattr(training, key)) not in values:
                allowed = " or ".join(repr(value) for value in values if value)
                raise ValueError(
                    f"`training.{key}` is {value!r}, which is not for training in float32 "
                    f"(`training.dtype` is {training.dtype!r}); give {allowed}."
                )
    if job.layout.world_size > cluster.num_devices:
        raise ValueError(
            f"`layout` has {_ranks(job.layout)}, but the cluster `{cluster.name}` only "
            f"{plural(cluster.num_devices, 'device')}; use smaller degrees, or more `num_nodes`."
        )
    dtypes = cluster.device.peak_flop_per_s
    for dtype in (training.dtype, training.base_dtype):
        if dtype not in dtypes:
            raise ValueError(
                f"`training.dtype` is {training.dtype!r}, but the device `{cluster.device.name}` "
                f"has no `peak_flop_per_s` for {dtype!r}; it has "
                f"{quoted(', '.join(sorted(dtypes)))}, so choose among these."
            )


def _ranks(layout: Layout) -> str:
    degrees = f"{layout.tp}*{layout.cp}*{layout.dp}*{layout.pp}"
    return f"tp*cp*dp*pp = {degrees} = {plural(layout.world_size, 'rank')}"


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
        except TypeError as error:  # Such as numbers of NumPy.
            name, problem = type(part).__name__, f"{error}".rstrip(".")
            raise ValueError(
                f"the {name} cannot be used: {problem}; give plain values of Python."
            ) from None
    job = Job(layout, schedule, model=model, training=training, cluster=cluster)
    check_job(job, "the program")


def check_plausible(cluster: Cluster) -> None:
    """Raises a `ValueError` for hardware that is slower or faster by far than all that is shipped,
    and says which value may have been meant.
    """
    device = cluster.device
    for name in ("memory_bytes", "memory_bandwidth_bytes_per_s"):
        _check(f"device.{name}", name, getattr(device, name))
    for dtype, peak in device.peak_flop_per_s.items():
        _check(f"device.peak_flop_per_s.{dtype}", "peak_flop_per_s", peak)
    if device.host is not None:
        for name in ("link_bytes_per_s", "memory_bytes_per_s"):
            _check(f"device.host.{name}", name, getattr(device.host, name))
    for link in cluster.links:
        for name in ("bandwidth_bytes_per_s", "latency_s"):
            _check(f"links.{link.name}.{name}", name, getattr(link, name))


def _check(key: str, name: str, value: float) -> None:
    low, high = SHIPPED[name]
    if value == 0 or low / _OTHER_UNIT <= value <= high * _OTHER_UNIT:
        return
    written = f"{value:.4g}"
    meant = [
        f"; did you mean {written}e{power}" if "e" not in written else f"; did you mean {in_unit:g}"
        for power in _UNITS
        if low <= (in_unit := value * 10.0**power) <= high
    ]
    raise ValueError(
        f"`cluster.{key}` = {value:.4g} is far from all shipped hardware, {low:.4g} to {high:.4g}"
        f"{''.join(meant[:1])}? If it is meant, give `allow_implausible = true`, or "
        "`--allow-implausible`."
    )


def job_warnings(job: Job) -> tuple[str, ...]:
    """Warnings about a job: tables used in place of missing ones, and implausible settings."""
    return (*job.notes, *_doubts(job))


def _doubts(job: Job) -> Iterator[str]:
    if job.cluster is not None:
        yield from _of_cluster(job.cluster)
    if job.model is not None:
        yield from _of_model(job.model)
        stages, layers = job.layout.pp * job.schedule.virtual_stages, job.model.num_layers
        ends = job.schedule.embedding_counts_as_layer or job.schedule.head_counts_as_layer
        if job.schedule.layers_per_stage is None and not ends and balances(layers, stages):
            yield (
                f"{stages} stages do not divide the {layers} layers of `{job.model.name}`, which "
                "are distributed by cost; `schedule.layers_per_stage` gives other numbers."
            )
    if job.calibrated is not None:
        low, high = _FACTORS
        for name in ("compute", "network"):
            factor = getattr(job.calibrated, name)
            if not low <= factor <= high:
                yield (
                    f"the calibrated factor `{name}` is {factor:.3g}, outside {low:g} to {high:g}: "
                    "the job may not be what was measured; check its model, layout and cluster."
                )


def _of_cluster(cluster: Cluster) -> Iterator[str]:
    links = cluster.links
    for i, link in enumerate(links):
        most = _MOST_OF_A_NETWORK if i else _MOST_OF_A_LINK
        if link.bandwidth_bytes_per_s > most:
            yield (
                f"the link `{link.name}` has {link.bandwidth_bytes_per_s:.3g} bytes/s per device, "
                f"which is more than any network has; if these are bits, give "
                f"{link.bandwidth_bytes_per_s / 8:.3g}."
            )
    for inner, outer in it.pairwise(links):
        if outer.bandwidth_bytes_per_s > inner.bandwidth_bytes_per_s:
            yield (
                f"the link `{outer.name}` is faster than `{inner.name}` within it "
                f"({outer.bandwidth_bytes_per_s:.3g} and {inner.bandwidth_bytes_per_s:.3g} "
                "bytes/s); links are listed innermost first."
            )
    if links[-1].group < cluster.num_devices:
        yield (
            f"the link `{links[-1].name}` joins {links[-1].group:,} of the cluster's "
            f"{cluster.num_devices:,} devices; leave its `group` out to join all of them."
        )
    for name in links_without_table(cluster):
        yield (
            f"the link `{name}` has no efficiency in the tables of `{cluster.name}`, so that of "
            "the link at its place is used; give the link its name in the tables, or expect other "
            "step times."
        )


def _of_model(model: Model) -> Iterator[str]:
    plain = Model(hidden_size=model.hidden_size, vocab_size=model.vocab_size)
    is_gpt = all(getattr(model, name) == getattr(plain, name) for name in _DEFAULTS)
    grouped = model.num_kv_heads not in (None, model.num_heads)
    if is_gpt and model.layers is None and (grouped or model.vocab_size > _WORDS_OF_GPT):
        listed = ", ".join(f"{name} {getattr(model, name)}" for name in _DEFAULTS)
        but = "grouped heads" if grouped else f"{model.vocab_size:,} words"
        yield (
            f"the model `{model.name}` has all defaults of GPT ({listed}), yet {but}; set those "
            "keys if it is of another kind, such as Llama."
        )
