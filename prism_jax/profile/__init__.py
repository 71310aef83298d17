from ._compile import compile_profile as compile_profile
from ._fit import fit_profile as fit_profile
from ._ladder import ladder as ladder
from ._observe import shuffled_means as shuffled_means
from ._profile import (
    FILES as FILES,
    Profile as Profile,
    load_profile as load_profile,
    save_profile as save_profile,
)
from ._step_graph import (
    replayed_step_times as replayed_step_times,
    step_graph as step_graph,
    traced_graph as traced_graph,
)
