"""`prism-jax models`: which models are shipped."""

import argparse

from .. import data
from .._summary import Column, Table
from ._command import Output, command


@command("list the shipped models", "", csv=True)
def run(arguments: argparse.Namespace) -> Output:
    from ..workload import count_parameters

    del arguments
    names = ("num_layers", "hidden_size", "vocab_size", "source")
    models = [
        {
            "name": model.name,
            "parameters": count_parameters(model),
            **{name: getattr(model, name) for name in names},
        }
        for model in map(data.load_model, data.list_models())
    ]
    columns = (
        Column("model", "name"),
        Column("billion parameters", "parameters", ".1f", scale=1e-9),
        Column("layers", "num_layers", "d"),
        Column("width", "hidden_size", "d"),
    )
    sources = [f"{model['name']}: {model['source']}" for model in models if model["source"]]
    return Output({"models": models}, [Table(columns, models, most=None), "\n".join(sources)])
