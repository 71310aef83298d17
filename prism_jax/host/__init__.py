from ._on_host import (
    by_columns as by_columns,
    each_on_host as each_on_host,
    on_host as on_host,
)
from ._pull_back import vjp_on_host as vjp_on_host
