"""All-reduce algorithms over send and receive: as data, on paper, in seconds, and on tensors.

:data:`ALGORITHMS` is the table of all there are, by name. DDP does not need them: its backends bring their own. They
are here to be read, to be compared on a link at hand, and to serve the hooks of the same names.
"""

from ddp_plugin.collectives.cost import (
    COSTS,
    SEEDS,
    Cost,
    Link,
    Measurement,
    cost_of,
    cost_table,
    crossover_bytes,
    fit,
    predict,
    relative_errors,
    render_cost_table,
)
from ddp_plugin.collectives.execution import (
    all_reduce,
    butterfly_all_reduce,
    parameter_server_all_reduce,
    ring_all_reduce,
    run,
    tree_all_reduce,
)
from ddp_plugin.collectives.lane import Lane, shared_lane
from ddp_plugin.collectives.measuring import measure, measure_gamma_s_per_byte
from ddp_plugin.collectives.schedules import ALGORITHMS, Schedule, Transfer, make_schedule
from ddp_plugin.collectives.simulation import loads, owners
from ddp_plugin.collectives.traffic import Traffic, count_traffic
from ddp_plugin.collectives.walkthrough import Walk, render_walk, walk

__all__ = [
    "ALGORITHMS",
    "COSTS",
    "SEEDS",
    "Cost",
    "Lane",
    "Link",
    "Measurement",
    "Schedule",
    "Traffic",
    "Transfer",
    "Walk",
    "all_reduce",
    "butterfly_all_reduce",
    "cost_of",
    "cost_table",
    "count_traffic",
    "crossover_bytes",
    "fit",
    "loads",
    "make_schedule",
    "measure",
    "measure_gamma_s_per_byte",
    "owners",
    "parameter_server_all_reduce",
    "predict",
    "relative_errors",
    "render_cost_table",
    "render_walk",
    "ring_all_reduce",
    "run",
    "shared_lane",
    "tree_all_reduce",
    "walk",
]
