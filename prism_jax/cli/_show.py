"""`prism-jax show` and `prism-jax models`: what a job assumes, and which models are shipped."""

import argparse
from typing import Any

import msgspec

from .. import data
from .._misc import quoted
from ._arguments import add_set_argument
from ._catalogue import table
from ._load import all_notes


_WIDEST = 60


class Show:
    HELP = "list every key of a job with its value, its unit and where the value is from"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "job",
            nargs="?",
            metavar="JOB",
            help="a shipped job (`prism-jax jobs`), or a .toml file; without it, list all keys",
        )
        add_set_argument(parser)

    @staticmethod
    def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
        if arguments.job is None:
            known = data.job_keys()
            keys = [msgspec.to_builtins(key) for key in known]
            rows = [(k.key, k.default or "", k.unit, k.allowed) for k in known]
            return {"keys": keys}, table(("key", "default", "unit", "allowed"), rows)
        job = data.load_job(arguments.job, arguments.overrides)
        known = data.assumed_keys(job)
        keys = [msgspec.to_builtins(key) for key in known]
        rows = [(k.key, quoted(data.toml_value(k.value), _WIDEST), k.unit, k.origin) for k in known]
        tables = [] if job.kernels is None else [source.name for source in job.kernels.sources]
        text = table(("key", "value", "unit", "from"), rows)
        notes = all_notes(job)
        return {"keys": keys, "kernels": tables, "notes": list(notes)}, "\n".join(
            [text, "", f"tables of kernels: {', '.join(tables) or 'none'}", *notes]
        )

    @staticmethod
    def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each key."""
        return result["keys"]


class Models:
    HELP = "list the shipped models"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """There are none."""

    @staticmethod
    def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
        from ..workload import count_parameters

        del arguments
        models = [data.load_model(name) for name in data.list_models()]
        listed = [
            {
                "name": model.name,
                "parameters": count_parameters(model),
                "num_layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "vocab_size": model.vocab_size,
                "source": model.source,
            }
            for model in models
        ]
        rows = [
            (m["name"], f"{m['parameters'] / 1e9:.1f}", m["num_layers"], m["hidden_size"])
            for m in listed
        ]
        sources = [f"{m['name']}: {m['source']}" for m in listed if m["source"]]
        text = table(("model", "billion parameters", "layers", "width"), rows)
        return {"models": listed}, "\n".join([text, "", *sources])

    @staticmethod
    def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each model."""
        return result["models"]
