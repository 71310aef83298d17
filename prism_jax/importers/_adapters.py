"""Adapters of a model of Hugging Face, as PEFT writes them in `adapter_config.json`."""

import re
from collections.abc import Mapping

from .._misc import quoted
from ._models import tables
from ._problems import Reader, Table


_ORDER = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Keys that are left out only if they say something.
_OTHERS = ("modules_to_save", "rank_pattern", "layers_to_transform", "use_dora", "lora_bias")


def read_adapters(config: Mapping[str, object]) -> tuple[Table, list[str]]:
    """The table `training.adapters` of a job, and a note for what was left out.

    **Raises:**

    `ValueError` for adapters that are not of low rank, or of no matrix that a job has.
    """
    read = Reader(config)
    if read.text("peft_type", "LORA").upper() not in ("LORA", "QLORA"):
        read.problems.append(
            f"`peft_type` {quoted(read.get('peft_type'))} of `adapter_config.json`"
        )
    targets, adapted = read.get("target_modules", "all-linear"), tables()["maps"]["adapted"]
    if isinstance(targets, str):  # A pattern of names, or all of them.
        words = adapted if targets == "all-linear" else re.findall(r"\w+", targets)
        names = [name for name in words if name in adapted]
    else:
        listed = targets if isinstance(targets, list) else []
        names = [str(name).rpartition(".")[2] for name in listed]
    unknown = sorted({name for name in names if name not in adapted})
    modules = {adapted[name] for name in names if name in adapted}
    if not modules:
        read.problems.append(f"`target_modules` {quoted(targets, 80)} of `adapter_config.json`")
    table = {
        "rank": read.count("r"),
        "modules": [name for name in _ORDER if name in modules],
        "dropout": read.rate("lora_dropout", 0.0) > 0,
    }
    read.check()
    notes = ["Adapters are read from `adapter_config.json`; what they adapt is not trained."]
    unread = [f"`{key}`" for key in _OTHERS if read.get(key)]
    unread += [f"adapters of `{quoted(name, 40)}`" for name in unknown[:8]]
    if unread:
        notes.append(f"Of `adapter_config.json` {', '.join(unread)} are left out.")
    return table, notes
