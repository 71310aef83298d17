from ._law import Law as Law
from ._pull_back import (
    Composed as Composed,
    composed_steps as composed_steps,
    pull_back as pull_back,
)
from ._replica import sample_replica_ends as sample_replica_ends
from ._simulate import simulate as simulate
