"""Files of jobs: written to be edited, imported, listed key by key; and those that are shipped."""

import json
import pathlib
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

import prism_jax as prism

from .. import data
from .._files import shown, written_whole
from .._misc import quoted, unknown_name
from .._summary import GIB, Column, Table, picked_attributes, plain
from . import _load
from ._options import Args, Output, command
from ._values import count


# What stands beside some keys of a first job; beside others, the start of what they are.
_BESIDE = {
    "model": "a shipped one (`prism-jax models`), or a .toml file",
    "cluster": "a shipped family (`prism-jax hardware`), or a .toml file",
    "world_size": "the number of GPUs, from which layout.dp and num_nodes follow",
    "training.software": "the stack that sets what is not set here; the others are below",
}
# Where a first job takes keys that it does not take by `--set`.
_ELSEWHERE = {
    **dict.fromkeys(("model", "layers"), "the name or the file of a model as `--model`"),
    "cluster": "the name or the file of a cluster as `--cluster`",
    "world_size": "`--gpus`",
    "training.global_batch_size": "`--global-batch`",
    "kernels": "it to the commands that read the job",
}
_LONGEST, _WIDEST = 8192, 60
_DEGREES = ("tp", "pp", "dp", "cp", "ep")


@command(
    "SET",
    how={"--gpus": count},
)
def init(args: Args) -> Output:
    """Write a job file to edit: the keys that one sets, with a comment on each.

    out JOB.toml (job.toml)  the file to write
    --model MODEL  a shipped model (`prism-jax models`), or a .toml file
        (llama-3.1-8b; of plain PyTorch llama-3.2-1b)
    --cluster CLUSTER (dgx-h100)  a shipped family of clusters (`prism-jax hardware`), or a .toml
        file
    --gpus N (64)  how many GPUs the job has, from which layout.dp and num_nodes follow
    --global-batch N  the sequences of a step (8 for each GPU)
    --framework NAME  the newest stack of a framework, such as pytorch for one process of plain
        PyTorch on each GPU (that which is the nearest to the layout and the cluster)
    --all  also write all other keys of its tables, as comments with their values

    example: prism-jax init my_job.toml --gpus 64 --global-batch 512
    """
    stack = _newest_stack(args.framework) if args.framework is not None else None
    plain = stack is not None and "weights" in data.load_software(stack).training
    name = args.model or ("llama-3.2-1b" if plain else "llama-3.1-8b")
    model = data.load_model(name)
    longest = model.max_positions if model.position == "learned" else _LONGEST
    keys: dict[str, Any] = {"model": name, "cluster": args.cluster}
    keys |= {"world_size": args.gpus}
    keys |= {"training.global_batch_size": args.global_batch or 8 * args.gpus}
    if stack is not None:
        keys["training.software"] = stack
    keys |= {"training.microbatch_size": 1, "training.sequence_length": min(longest, _LONGEST)}
    for change in data.overrides_of(args.overrides):
        for key, place in _ELSEWHERE.items():
            if f"{change.key}.".startswith(f"{key}."):
                raise ValueError(f"override `{change}`: give {place}, instead.")
        keys[change.key] = change.value
    if not model.vocab_size and not any("sequence_length" in text for text in args.overrides):
        raise ValueError(
            f"`{quoted(name)}` is a model without words; say how many patches or other "
            "places a sample has, such as `--set training.sequence_length=256`."
        )
    job = _job_of(args, keys)
    prism.prediction.memory(job)  # Raises where the layout does not fit the model.
    if "training.software" not in keys:
        zero = 3 if job.layout.tp == job.layout.pp == 1 else 1
        usual = _job_of(args, {"training.zero": zero} | keys)
        keys["training.software"] = prism.prediction.nearest_stack(usual)
        job = _job_of(args, keys)
    with written_whole(args.out) as partial:
        text = commented_job(keys, job if args.all else None)
        partial.write_text(text, encoding="utf-8")
    out, stack = shown(args.out), keys["training.software"]
    text = f"{out}: {job.header}; stack `{quoted(stack)}`; next: prism-jax predict {out}"
    return Output({"job": args.out, "software": stack}, text)


def _newest_stack(framework: str) -> str:
    """The shipped stack of a framework with the latest year."""
    stacks = data.list_names("software stack")
    names = [name for name in stacks if re.fullmatch(rf"{re.escape(framework)}(-\d{{4}})?", name)]
    if not names:
        every = dict.fromkeys(re.sub(r"-\d{4}$", "", name) for name in stacks)
        raise ValueError(unknown_name("framework", framework, every))
    return max(names)


def _job_of(args: Args, keys: Mapping[str, Any]) -> data.Job:
    return data.make_job({}, pathlib.Path(args.out), keys)


def commented_job(keys: Mapping[str, Any], whole: data.Job | None = None) -> str:
    """The file of a job with these keys, a comment on each and a list of the stacks. With the job,
    all other keys of its tables follow as comments, with the values that they have.
    """
    listed = {key.key: key for key in data.job_keys()}
    lines = ['kind = "job"']
    for name, value in keys.items():
        meaning = re.split(r"[,;:.](?: |$)", listed[name].about)[0] if name in listed else ""
        line = f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}"
        lines.append(f"{line:<34} # {_BESIDE.get(name, meaning)}".rstrip("# "))
    stacks = [*map(data.load_software, data.list_names("software stack"))]
    for kind, shards in (("with FSDP", True), ("without FSDP", False)):
        names = (stack.name for stack in stacks if (stack.training.get("zero") == 3) == shards)
        lines += _comment(f"Stacks {kind}: {', '.join(names)}")
    for key in () if whole is None else data.assumed_keys(whole):
        # Those of a table within a table are a choice of their own.
        if key.key in keys or re.fullmatch(r"(layout|schedule|training)\.\w+", key.key) is None:
            continue
        meaning, allowed = listed[key.key].about, listed[key.key].allowed
        meaning = re.split(r"\.(?: (?=[A-Z`])|$)", meaning)[0]  # The first sentence.
        value = data.toml_value(key.value) or "..."
        lines += ["", *_comment(f"{meaning}; {allowed}"), f"# {key.key} = {value}"]
    return "\n".join([*lines, ""])


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")


@command(
    "SET --allow-oom",
)
def import_(args: Args) -> Output:
    """Make a job file from the configuration of a model and of a training in other software.

    files FILE...  a config.json of Hugging Face or its folder; a launch script, a YAML, TOML or
        JSON file or printed arguments of Megatron-LM, NeMo, torchtitan, DeepSpeed and others; or
        several
    --gpus N  how many GPUs the job has (those of the launcher in the files)
    --cluster CLUSTER  a shipped family of clusters (`prism-jax hardware`), or a .toml file
    --batch N  the sequences of a step (those of the files, or published ones)
    --var NAME=VALUE...  the value of a variable that a script does not assign (that of the
        environment); can be repeated
    --leave-out KEY...  go on without a key of the files, whatever it costs; can be repeated
    --software NAME  the software stack (`prism-jax kernels`) that sets what the files do not say;
        by default that of the framework and the year, if the files say them
    --strict  refuse keys that are not known
    --out JOB.toml (required)  the job to write

    example: prism-jax import config.json --gpus 64 --batch 512 --set layout.tp=8 --out my_job.toml
    """
    names = ("cluster", "batch", "strict", "software", "leave_out")
    options = {name: getattr(args, name) for name in names} | {"variables": args.var}

    def imported(overrides: list[str]) -> prism.importers.Imported:
        return prism.importers.import_job(args.files, args.gpus, overrides=overrides, **options)

    imported_job = imported(args.overrides)
    job: Any = imported_job.job
    prism.prediction.memory(job)  # Raises where the layout does not fit the model.
    if imported_job.question:
        raise ValueError(imported_job.question)
    data.save_job(job, args.out, comments=imported_job.comments)
    for note in imported_job.notes:
        _load.tell_note(note)
    _load.tell_idle_sets(args.overrides, [lambda overrides: imported(overrides).job])
    try:
        _load.check_memory(args, job)
    except ValueError as error:
        problem = str(error).rstrip(".")
        raise RuntimeError(f"{problem}; {shown(args.out)} is written as it is.") from None
    parameters = prism.workload.count_parameters(job.model)
    training = job.training
    text = (
        f"{shown(args.out)}: {job.header}\n{parameters / 1e9:.1f} billion parameters, "
        f"{training.dtype}; software stack: {quoted(training.software or 'none')}"
    )
    result = {
        "out": args.out,
        "parameters": parameters,
        "world_size": job.layout.world_size,
        "global_batch_size": job.batch_size,
        "sequence_length": training.sequence_length,
        "software": training.software,
        "kind": imported_job.kind,
        "status": imported_job.status,
        "notes": imported_job.notes,
    }
    return Output(result, text)


@command("SET", csv=True)
def show(args: Args) -> Output:
    """List every key of a job with its value, its unit and where the value is from.

    job [JOB]  a shipped job (`prism-jax jobs`), or a .toml file; without it, list all keys

    example: prism-jax show my_job.toml --set layout.tp=8
    """
    if args.job is None:
        known = data.job_keys()
        columns = ("key", Column("default", lambda key: key.default or ""), "unit", "allowed")
        return Output({"keys": known}, Table(columns, known))
    job = data.load_job(args.job, args.overrides)
    keys, notes = data.assumed_keys(job), _load.all_notes(job)
    names = [] if job.kernels is None else [source.name for source in job.kernels.sources]
    value = Column("value", lambda key: quoted(data.toml_value(key.value), _WIDEST))
    table = Table(("key", value, "unit", Column("from", "where_from")), keys)
    lines = [f"tables of kernels: {', '.join(names) or 'none'}", *notes]
    lines += filter(None, [prism.prediction.uncounted(job)])
    return Output({"keys": keys, "kernels": names, "notes": notes}, table, lines)


@command("--sources", csv=True)
def jobs(args: Args) -> Output:
    """List the shipped jobs.

    example: prism-jax jobs --sources
    """
    jobs = [*map(data.load_job, data.list_names("job"))]
    rows = [_row(job) for job in jobs]
    columns = (
        Column("job", "name"),
        Column("GPUs", "world_size", "d"),
        "model",
        "cluster",
        Column("layout", lambda row: " ".join(f"{n}{row['layout'][n]}" for n in _DEGREES)),
        "schedule",
        Column("measured", _measured, unit="s"),
    )
    return Output({"jobs": rows}, Table(columns, rows), _sources(args, jobs))


def _row(job: data.Job) -> dict[str, Any]:
    return {
        "name": job.name,
        "world_size": job.layout.world_size,
        "model": job.model.name if job.model else "",
        "cluster": job.cluster.name if job.cluster else "",
        "layout": plain(job.layout),
        "schedule": job.schedule.kind,
        "num_microbatches": job.schedule.num_microbatches,
        "measured": plain(job.measured) or {},
        "source": job.source,
    }


def _measured(row: dict[str, Any]) -> Any:
    return row["measured"].get("mean_s", row["measured"].get("p50_s", ""))


def _sources(args: Args, listed: Iterable[Any]) -> str:
    return "\n".join(f"{item.name}: {item.source}" for item in listed if args.sources)


@command("--sources", csv=True)
def models(args: Args) -> Output:
    """List the shipped models.

    example: prism-jax models --sources
    """
    models = [*map(data.load_model, data.list_names("model"))]
    sizes = ("num_layers", "hidden_size", "vocab_size", "source")
    rows = [
        {
            "name": model.name,
            "parameters": prism.workload.count_parameters(model),
            **picked_attributes(model, *sizes),
        }
        for model in models
    ]
    columns = (
        Column("model", "name"),
        Column("billion parameters", "parameters", ".1f", scale=1e-9),
        Column("layers", "num_layers", "d"),
        Column("width", "hidden_size", "d"),
    )
    return Output({"models": rows}, Table(columns, rows), _sources(args, models))


@command("--sources", csv=True)
def hardware(args: Args) -> Output:
    """List the shipped devices and clusters, or some of them.

    names [NAME]...  devices or clusters (all)

    example: prism-jax hardware dgx-h100
    """
    of_devices, of_clusters = data.list_names("device"), data.list_names("cluster")
    names = {*of_devices, *of_clusters}
    for name in args.names:
        if name not in names:
            raise ValueError(unknown_name("device or cluster", name, names))
    wanted = {*args.names} or names
    # The job sets the number of nodes of a family; a cluster of two racks has all links.
    clusters = [data.load_cluster(name, 10**6) for name in of_clusters if name in wanted]
    wanted |= {cluster.device.name for cluster in clusters}
    devices = _in_groups([data.load_device(name) for name in of_devices if name in wanted])
    clusters = _in_groups(clusters)
    peaks = sorted({dtype for device in devices for dtype in device.peak_flop_per_s})
    columns = (
        _group_column(devices),
        Column("device", "name"),
        Column("GiB", "memory_bytes", ".1f", scale=1 / GIB),
        Column("TB/s", "memory_bandwidth_bytes_per_s", ".2f", scale=1e-12),
        *(
            Column(f"{dtype} TFLOP/s", f"peak_flop_per_s.{dtype}", ".0f", scale=1e-12)
            for dtype in peaks
        ),
    )
    columns_of_clusters = (
        _group_column(clusters),
        Column("cluster", "name"),
        Column("devices a node", "devices_per_node"),
        Column("device", "device.name"),
        Column("links", _links),
    )
    result = {
        "devices": msgspec.to_builtins(devices),
        "clusters": [_family(cluster) for cluster in clusters],
    }
    tables = [Table(columns, devices)]
    tables += [Table(columns_of_clusters, clusters)] * bool(clusters)
    return Output(result, *tables, _sources(args, (*devices, *clusters)))


# Groups of machines by how their names begin, in the order in which they are listed.
_GROUPS = {
    "cloud": r"(aws|azure|coreweave|gcp|lambda)-",
    "NVIDIA": r"(?!rtx-|mi\d|tpu-)",
    "NVIDIA RTX": "rtx-",
    "AMD": r"mi\d",
    "TPU": "tpu-",
}


def _group_of(machine: Any) -> str:
    return next(group for group, begins in _GROUPS.items() if re.match(begins, machine.name))


def _in_groups(machines: list[Any]) -> list[Any]:
    return sorted(machines, key=lambda machine: [*_GROUPS].index(_group_of(machine)))


def _group_column(machines: list[Any]) -> Column:
    """The group of a machine, beside the first of the group."""
    firsts = {_group_of(machine): machine.name for machine in reversed(machines)}
    groups = {name: group for group, name in firsts.items()}
    return Column("group", lambda machine: groups.get(machine.name, ""))


def _links(cluster: data.Cluster) -> str:
    return ", ".join(
        f"{link.name} {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s" for link in cluster.links
    )


def _family(cluster: data.Cluster) -> dict[str, Any]:
    """A cluster without its number of nodes."""
    family = msgspec.to_builtins(cluster)
    del family["num_nodes"]
    for link in family["links"][-1:]:
        link["group"] = None
    return family
