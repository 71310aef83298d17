"""Writes `job_reference.md`, the keys of a job file, from the schema: `make reference`."""

import pathlib

from prism_jax.data._reference import job_keys


_HEAD = """\
# Keys of a job file

Written by `make reference` from the schema. `prism-jax show` prints the same, `prism-jax show JOB`
the values of a job and whether each was given, is of its software stack, or is the default here,
and `prism-jax init --all` writes a job with a comment on each key. A name in place
of the tables `model`, `cluster` or `cluster.device` stands for a shipped file, a path for another.
Keys with `[]` are of each table of a list. A key that is neither required nor has a default may be
left out.

| key | what it is | unit | allowed | default |
|---|---|---|---|---|
"""


def job_reference() -> str:
    """The page."""
    rows = []
    for key in job_keys():
        default = "required" if key.default is None else f"`{key.default}`" if key.default else ""
        rows.append(f"| `{key.key}` | {key.about} | {key.unit} | {key.allowed} | {default} |")
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    page = pathlib.Path(__file__).parents[1] / "docs/job_reference.md"
    page.write_text(job_reference(), encoding="utf-8")
