"""Makes a job from a configuration of Hugging Face. It has no training, so that published batches
are known here.
"""

from collections.abc import Mapping

from .._misc import quoted
from ._draft import BatchSizes, Draft, Status
from ._models import model_table, tables, type_of
from ._problems import Reader, Table, is_off


_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "model_max_length",
    "seq_length",
    "max_seq_len",
)
# The configurations of the language model within that of a larger model.
_PARTS = ("thinker_config", "text_config", "llm_config", "language_config", "decoder_config")
# The model's longest sequence, but at most the usual length in pre-training.
_LONGEST = 8192


def read_hugging_face(
    config: Mapping[str, object], num_gpus: int, *, strict: bool = False
) -> Draft:
    """What a `config.json` says of a job.

    **Arguments:**

    - `config`: the table of the file.
    - `num_gpus`: the number of GPUs of the job.
    - `strict`: whether keys that are not known are refused, in place of a note.

    **Raises:**

    `ValueError` for an unknown architecture, and for sizes that are missing or contradict
    each other.
    """
    model, read, status = read_model(config, strict=strict)
    longest = read.count(next((key for key in _LENGTHS if key in read), _LENGTHS[0]), _LONGEST)
    tables: Table = {
        "model": model,
        "layout": {"dp": num_gpus},
        "schedule": {"kind": "1f1b", "num_microbatches": 1},
        "training": {"microbatch_size": 1, "sequence_length": min(longest, _LONGEST)},
    }
    read.check()
    return Draft(
        tables,
        read.notes,
        "huggingface",
        batch=_published_batch(read.text("model_type"), model),
        question="the batch is not known; give the sequences of a step with `--batch`",
        status=status,
        why_software=_NO_STACK,
    )


def read_model(
    config: Mapping[str, object], *, strict: bool = False
) -> tuple[Table, Reader, Status]:
    """The table `model` of a job; what has read the configuration, with notes, and with problems if
    a job cannot express the model; and whether its type is known.

    **Arguments:**

    - `config`: the table of the file.
    - `strict`: as in `read_hugging_face`.
    """
    part, types = dict(config), [config.get("model_type")]
    while key := next((key for key in _PARTS if isinstance(part.get(key), dict)), None):
        inner = part.pop(key)
        assert isinstance(inner, dict)
        part |= inner
        types.insert(0, inner.get("model_type"))
    if "tie_word_embeddings" in config:  # What the larger model says of its head holds.
        part["tie_word_embeddings"] = config["tie_word_embeddings"]
    read = Reader(part, strict=strict)
    known = next((name for name in types if isinstance(name, str) and type_of(name)), None)
    if known is None:
        read.notes.append(f"The type `{quoted(types[0])}` is not known: {_GUESSED}.")
    if len(types) > 1:
        read.notes.append("Only the model of text is imported, without what reads images or sound.")
    kind = type_of(known or "guessed")
    assert kind is not None
    model = model_table(read, kind, is_part=len(types) > 1)
    if read.problems and not types[0]:
        read.problems.insert(0, "`model_type` is missing")
    if "moe" not in kind["modules"] and read.get("is_moe") is not False:
        for key in ("num_experts", *kind["names"]["num_experts"]):
            if read.count(key, 1, least=0) > 1:
                read.problems.append(f"`{key}`, which the type `{known}` does not have")
    left_out = _left_out(read)
    if strict:
        unknown = left_out.pop(_UNKNOWN, [])
        read.problems += [f"`{quoted(key, 40)}`, which is not known" for key in unknown]
    read.notes += [
        f"{section} are left out: {', '.join(f'`{quoted(key, 40)}`' for key in keys[:8])}"
        f"{f' and {len(keys) - 8} more' * (len(keys) > 8)}."
        for section, keys in left_out.items()
    ]
    return model, read, "guessed" if known is None else "imported"


_GUESSED = (
    "it is read by the usual names of keys, as a decoder in the shape of Llama, with experts if "
    "they are said"
)


_UNKNOWN = "Keys that are not known"


def _left_out(read: Reader) -> dict[str, list[str]]:
    """The keys that were not read and say something, by their sections."""
    beginnings = {name: tuple(text.split()) for name, text in tables()["sections"].items()}
    sections: dict[str, list[str]] = {}
    for key in read.unread():
        if not is_off(read.get(key)):
            of_key = (name for name, begin in beginnings.items() if key.startswith(begin))
            section = next(of_key, _UNKNOWN)
            sections.setdefault(section, []).append(key)
    sections.pop("", None)
    return sections


def _published_batch(kind: str, model: Table) -> BatchSizes | None:
    """The batch of a model of a `model_type`, if its shape is that of a published one."""
    layers = model.get("num_layers") or sum(layer["repeat"] for layer in model["layers"])
    shape = [kind, model["hidden_size"], layers, model["vocab_size"]]
    rows = (row for row in tables()["published"]["batches"] if row[:4] == shape)
    return next((BatchSizes(*row[4:]) for row in rows), None)


_NO_STACK = (
    "A configuration of Hugging Face does not say which software trains the model, so no stack "
    "sets keys of `[training]`, and the host launches kernels in no time; `--software` gives a "
    "stack, such as `megatron-core-2024` or `torchtitan`."
)
