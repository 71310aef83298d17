from ._check import check_num_samples as check_num_samples, check_program as check_program
from ._critical import CriticalPaths as CriticalPaths, critical_paths as critical_paths
from ._placed import (
    Placed as Placed,
    placed as placed,
    ready_slopes as ready_slopes,
    replicas_ready as replicas_ready,
)
from ._pull_back import (
    Composed as Composed,
    composed_steps as composed_steps,
    given_the_rest as given_the_rest,
    pull_back as pull_back,
)
from ._random import key_data as key_data
from ._replica import sample_replica_ends as sample_replica_ends
from ._simulate import simulate as simulate
