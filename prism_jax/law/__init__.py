from ._distance import (
    crps as crps,
    crps_of_each as crps_of_each,
    matched as matched,
    quantiles as quantiles,
    wasserstein as wasserstein,
)
from ._errors import (
    FEWEST as FEWEST,
    LEVELS as LEVELS,
    Errors as Errors,
    GroupSums as GroupSums,
    errors_by_group as errors_by_group,
    group_sums as group_sums,
    more_steps as more_steps,
)
from ._file import load_law as load_law, save_law as save_law
from ._histogram import Histogram as Histogram
from ._law import (
    QUANTILES as QUANTILES,
    Allocations as Allocations,
    Law as Law,
    about_noise as about_noise,
    figures as figures,
    law_table as law_table,
)
from ._make import (
    Counted as Counted,
    counted as counted,
    law_of as law_of,
    merge_allocations as merge_allocations,
    merge_chunks as merge_chunks,
    merge_laws as merge_laws,
)
