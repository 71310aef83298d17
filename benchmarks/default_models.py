"""Writes the default configurations of the decoders of Transformers, and how many parameters each
has, to compare with what is imported. It needs `transformers` and a CPU's `torch`, which this
project does not: run it with an environment of its own, then `benchmarks/imports.py`.

    python benchmarks/default_models.py FOLDER
    python benchmarks/imports.py FOLDER --parameters FOLDER/parameters.toml

With `--defaults` it prints, for the types of `prism_jax/importers/models.toml`, what the classes
have for the keys that the table reads.
"""

import dataclasses
import json
import os
import pathlib
import re
import sys
import tomllib
import warnings


_TABLE = pathlib.Path(__file__).parents[1] / "prism_jax/importers/models.toml"


def main(folder: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    out = pathlib.Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    counts = []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = CONFIG_MAPPING[kind]()
            (out / f"{kind}.json").write_text(json.dumps(config.to_dict(), default=str))
            counts.append((kind, count(config)))
        except Exception as error:  # A default without sizes makes no model.
            print(f"{kind}: {' '.join(str(error).split())[:100]}", file=sys.stderr)
    with (out / "parameters.toml").open("w") as file:
        for kind, number in counts:
            source = f'of = "all"\nsource = "Transformers {version()}, on its meta device"'
            file.write(f'[[models]]\nfile = "{kind}.json"\nparameters = {number}\n{source}\n\n')


def version() -> str:
    import transformers

    return transformers.__version__


def count(config) -> int:
    """The number of parameters of the model of a configuration, without making them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def print_defaults() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    table = tomllib.loads(_TABLE.read_text())
    keys = {*_keys(table)}
    others = ("maps", "sections", "same", "defaults", "decoder", "experts", "guessed")
    for kind in sorted({*table, *table["same"]} - {*others}):
        if kind not in CONFIG_MAPPING:
            continue
        fields = dataclasses.fields(CONFIG_MAPPING[kind])
        values = {one.name: one.default for one in fields if one.name in keys}
        values = {
            key: value
            for key, value in values.items()
            if isinstance(value, bool | int | float | str) and value not in (False, "", 0)
        }
        said = ", ".join(f"{key} = {json.dumps(values[key])}" for key in sorted(values))
        print(f"{json.dumps(kind) if '-' in kind else kind} = {{ {said} }}")


def _keys(table):
    """The keys that formulas read, and their other names."""
    for name, value in table.items():
        if name == "names":
            yield from (key for names in value.values() for key in names)
        elif isinstance(value, dict) and name not in ("defaults", "maps"):
            yield from _keys(value)
        for formula in _formulas(value):
            yield from re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^']*'", "", formula))


def _formulas(value):
    if isinstance(value, str) and value.startswith("="):
        yield value
    elif isinstance(value, list):
        yield from (formula for one in value for formula in _formulas(one))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if "--defaults" in sys.argv:
        print_defaults()
    else:
        main(sys.argv[1])
