from ._check import (
    MAX_BLOCKS as MAX_BLOCKS,
    check_job as check_job,
    check_parts as check_parts,
    job_warnings as job_warnings,
)
from ._derived import DERIVED as DERIVED
from ._failures import (
    Cause as Cause,
    Failures as Failures,
    Slow as Slow,
    UnequalNodes as UnequalNodes,
    UnequalWeeks as UnequalWeeks,
    at_age as at_age,
    load_failures as load_failures,
)
from ._finetuning import Adapters as Adapters, Lengths as Lengths, Packed as Packed
from ._given import Given as Given
from ._hardware import Cluster as Cluster, Device as Device, Link as Link, Power as Power
from ._job import (
    Call as Call,
    Job as Job,
    Layout as Layout,
    Measured as Measured,
    Outline as Outline,
    ScheduleConfig as ScheduleConfig,
    balances as balances,
)
from ._kernels import (
    LEVEL as LEVEL,
    Calibrated as Calibrated,
    Constant as Constant,
    Kernels as Kernels,
    Source as Source,
    Uncertainty as Uncertainty,
    apply_calibrated as apply_calibrated,
)
from ._load import (
    kernels_of as kernels_of,
    load_cluster as load_cluster,
    load_device as load_device,
    load_job as load_job,
    load_model as load_model,
    make_job as make_job,
    save_job as save_job,
)
from ._load_kernels import (
    load_kernels as load_kernels,
    load_network as load_network,
    load_source as load_source,
    load_variability as load_variability,
    save_shapes as save_shapes,
    save_source as save_source,
)
from ._model import Layer as Layer, Model as Model, repeat_layers as repeat_layers
from ._operators import Operators as Operators, load_operators as load_operators
from ._override import (
    apply_kernel_override as apply_kernel_override,
    overrides_of as overrides_of,
    parse_override as parse_override,
)
from ._priors import (
    Priors as Priors,
    generation_of as generation_of,
    load_expected_errors as load_expected_errors,
    load_priors as load_priors,
)
from ._read import (
    is_profile as is_profile,
    list_names as list_names,
    located as located,
    parse_toml as parse_toml,
    read_rows as read_rows,
    read_struct as read_struct,
    read_text as read_text,
    read_toml as read_toml,
    without_none as without_none,
    write_csv as write_csv,
    write_toml as write_toml,
)
from ._reference import assumed_keys as assumed_keys, job_keys as job_keys, toml_value as toml_value
from ._shapes import (
    Product as Product,
    ShapeTable as ShapeTable,
    Term as Term,
    column as column,
    outside as outside,
    parse_product as parse_product,
)
from ._training import Training as Training, load_software as load_software
from ._types import (
    AtLeastOne as AtLeastOne,
    Count as Count,
    Name as Name,
    NeverValidError as NeverValidError,
    NonNegative as NonNegative,
    Positive as Positive,
    PositiveOrInfinite as PositiveOrInfinite,
    Seed as Seed,
    convert as convert,
)
from ._variations import (
    SECONDS as SECONDS,
    Variation as Variation,
    has_seconds as has_seconds,
    read_variations as read_variations,
    replace_variations as replace_variations,
    variation_table as variation_table,
    write_variations as write_variations,
)
