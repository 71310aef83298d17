"""What a file of another framework says of a job, before the rest is filled in."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from ._problems import Table


Status = Literal["imported", "guessed"]


class BatchSizes(NamedTuple):
    """The batch of a step.

    **Attributes:**

    - `sequences`: the number of sequences in a step.
    - `length`: the number of tokens in each, if it is published with the batch.
    - `source`: who published it, if the file does not say it itself.
    """

    sequences: int
    length: int | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Draft:
    """What each framework's reader makes of a file.

    **Attributes:**

    - `tables`: the tables `model`, `layout`, `schedule` and `training` of a job.
    - `notes`: a sentence for each thing that was left out or assumed.
    - `framework`: `huggingface`, `megatron`, or another framework's name.
    - `batch`: the batch that the file says or that is published for its model.
    - `question`: what to ask for if there is no batch; empty if one microbatch is right.
    - `status`: `guessed` if the type of the model is not known, so that it is read by the usual
        names of keys.
    - `software`: the software stack of the framework and the time of the file, if it is known.
    - `why_software`: a sentence that says how the stack was chosen, or why there is none.
    - `comments`: by dotted keys of a job, where each is from.
    """

    tables: Table
    notes: list[str]
    framework: str
    batch: BatchSizes | None = None
    question: str = ""
    status: Status = "imported"
    software: str | None = None
    why_software: str = ""
    comments: Mapping[str, str] = dataclasses.field(default_factory=dict)
