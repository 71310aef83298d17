from ._ray import RayExecutor as RayExecutor
from ._tasks import prepare_worker as prepare_worker, run_tasks as run_tasks
