"""The layout and the schedule in arguments of Megatron-LM, and the layers of its stages."""

import re

from ._problems import MOST_LAYERS, Reader, Table


def layout_of(read: Reader, num_gpus: int) -> Table:
    """The table of the layout of a job."""
    tp = read.count("tensor-model-parallel-size", 1)
    pp = read.count("pipeline-model-parallel-size", 1)
    cp = read.count("context-parallel-size", 1)
    layout = {"tp": tp, "pp": pp, "cp": cp, "ep": read.count("expert-model-parallel-size", 1)}
    if "expert-tensor-parallel-size" in read:
        layout["etp"] = read.count("expert-tensor-parallel-size")
    if num_gpus % (tp * pp * cp) != 0:
        read.problems.append(f"{num_gpus} GPUs, which tp*pp*cp = {tp}*{pp}*{cp} does not divide")
    layout["dp"] = max(1, num_gpus // (tp * pp * cp))
    if "num-experts" not in read:
        layout["ep"] = 1
        layout.pop("etp", None)
    return layout


def schedule_of(read: Reader, model: Table, layout: Table, training: Table) -> Table:
    """The kind of schedule, and how the layers are distributed over its stages."""
    replicas = layout["dp"] * training["microbatch_size"]
    batch = read.count("global-batch-size", replicas)
    if batch % replicas != 0:
        read.problems.append(
            f"`global-batch-size` {batch}, which dp*micro-batch-size = {replicas} does not divide"
        )
    pp, count = layout["pp"], sum(layer["repeat"] for layer in model["layers"])
    dealt = _dealt(read, pp, count)
    virtual = len(dealt) // pp if dealt else _virtual_stages(read, pp, count)
    schedule: Table = {
        "kind": _kind(read, layout, virtual),
        "num_microbatches": max(1, batch // replicas),
        "virtual_stages": virtual,
    }
    if read.flag("no-overlap-p2p-communication") and layout["pp"] > 1:
        if virtual > 1:
            read.problems.append("`no-overlap-p2p-communication` with several stages on a rank")
        schedule["blocking"] = True
    group = read.count("microbatch-group-size-per-virtual-pipeline-stage", 0, least=0)
    if group and virtual > 1:
        schedule["microbatch_group_size"] = group
    if dealt and len(set(dealt)) > 1:
        schedule["layers_per_stage"] = dealt
    for end, key in (("embedding", "embedding"), ("loss", "head")):
        if read.flag(f"account-for-{end}-in-pipeline-split"):
            schedule[f"{key}_counts_as_layer"] = True
    return schedule


def _kind(read: Reader, layout: Table, virtual: int) -> str:
    if read.flag("overlap-moe-expert-parallel-comm") and layout["ep"] > 1:
        if layout["pp"] == 1 or virtual > 1:
            return "overlapped-1f1b"
        read.problems.append(
            "`overlap-moe-expert-parallel-comm` on several pipeline ranks of one stage each"
        )
    return "interleaved-1f1b" if virtual > 1 else "1f1b"


def _virtual_stages(read: Reader, pp: int, count: int) -> int:
    each = read.count("num-layers-per-virtual-pipeline-stage", 0, least=0)
    if each:
        ends = sum(
            read.flag(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")
        )
        return max(1, (count + ends) // (pp * each))
    return read.count("num-virtual-stages-per-pipeline-rank", 1)


def _dealt(read: Reader, pp: int, count: int) -> list[int]:
    """The number of layers in each stage, if the arguments give them."""
    text, pattern = read.text("pipeline-model-parallel-layout"), read.text("hybrid-layer-pattern")
    main = pattern.partition("/")[0]
    found: list[int] = []
    if text:
        try:
            found = layers_of_layout(text)
        except ValueError as error:
            read.problems.append(f"`pipeline-model-parallel-layout` of {error}")
    elif "|" in main:
        found = [len(stage) for stage in main.split("|")]
    first = read.count("decoder-first-pipeline-num-layers", 0, least=0)
    last = read.count("decoder-last-pipeline-num-layers", 0, least=0)
    if first or last:
        found = _uneven(read, pp, count, first, last)
    if found and (len(found) % pp or sum(found) != count):
        read.problems.append(
            f"{len(found)} stages with {sum(found)} layers, of {count} on {pp} ranks"
        )
        return []
    return found


def _uneven(read: Reader, pp: int, count: int, first: int, last: int) -> list[int]:
    """The given numbers of layers for the first and the last rank, and equal ones between them."""
    virtual = _virtual_stages(read, pp, count)
    if "num-layers-per-virtual-pipeline-stage" in read:
        virtual = (
            1 if not first else max(1, first // read.count("num-layers-per-virtual-pipeline-stage"))
        )
    between = pp - bool(first) - bool(last)
    rest = count - first - last
    if pp * virtual > MOST_LAYERS:
        read.problems.append(f"{pp}*{virtual} stages for {count} layers")
        return []
    each = rest // between if between else 0
    ranks = [first or each, *[each] * (pp - 2), last or each]
    if pp < 2 or rest != each * between or any(rank % virtual for rank in ranks):
        read.problems.append("uneven stages that do not divide")
        return []
    return [rank // virtual for rank in ranks] * virtual


# A repeated letter or pair of brackets, and how deep these may lie in each other.
_REPEAT = re.compile(r"(?:\(([^()]*)\)|([EtmL|]))\*(\d{1,6})(?!\d)")
_DEEPEST = 100


def layers_of_layout(text: str) -> list[int]:
    """The number of layers (`t`) in each virtual stage. Stages are separated by `|`, `x*3` and
    `(...)*3` repeat, `E` is the embedding, `L` the loss and `m` a multi-token-prediction layer.

    **Raises:**

    A `ValueError` if it cannot be read, or if the embedding or the loss is not at its end.
    """
    spread = "".join(text.split()).replace(",", "")
    for _ in range(_DEEPEST):
        # Before they are written out, which may take more memory than there is.
        if sum(len(m[1] or m[2] or "") * int(m[3]) for m in _REPEAT.finditer(spread)) > MOST_LAYERS:
            raise ValueError("more layers than any model has")
        spread, found = _REPEAT.subn(lambda m: (m[1] or m[2] or "") * int(m[3]), spread)
        if not found:
            break
    if "*" in spread:
        raise ValueError("repeats that are no numbers of layers")
    spread = re.sub(r"[()]", "", spread)
    stages = spread.split("|")
    if not re.fullmatch(r"E[t|]*m*L", spread):
        raise ValueError("a pipeline whose ends are not on its outer stages")
    return [stage.count("t") for stage in stages]
