from .. import data
from .._summary import Column, Table, picked
from ._options import SOURCES, Given, Output, command


@command("--sources", SOURCES, csv=True)
def run(given: Given) -> Output:
    """List the shipped models."""
    from ..workload import count_parameters

    models = [
        {
            "name": model.name,
            "parameters": count_parameters(model),
            **picked(model, "num_layers", "hidden_size", "vocab_size", "source"),
        }
        for model in map(data.load_model, data.list_models())
    ]
    columns = (
        Column("model", "name"),
        Column("billion parameters", "parameters", ".1f", scale=1e-9),
        Column("layers", "num_layers", "d"),
        Column("width", "hidden_size", "d"),
    )
    sources = [f"{model['name']}: {model['source']}" for model in models if given.sources]
    return Output({"models": models}, [Table(columns, models, most=None), "\n".join(sources)])
