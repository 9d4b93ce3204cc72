"""Two nodes are both the first one, and nothing is restarted, unless torchrun is told.

Said: start `torchrun --nnodes=2 --nproc_per_node=8 --master_addr=.. train.py` on both nodes; torchrun recovers from
failures.

True: without `--node_rank` (or `--rdzv_backend=c10d`, which hands ranks out) both agents are node 0, and want the same
port. And the default of `--max-restarts` is 0. With restarts, the script must also resume by itself.

Instead: give both; `CustomDDPStrategy` and `AutoResume()` go on from the newest whole checkpoint.
"""

from _start import run
from torch.distributed.run import config_from_args, parse_args

NUM_RANKS = 1


def nodes(*options):
    """Returns what torchrun understands on each of two nodes."""
    configs = []
    for node in range(2):
        given = [option.format(node=node) for option in options]
        command = ["--nnodes=2", "--nproc_per_node=8", "--master_addr=10.0.0.1", *given, "train.py"]
        configs.append(config_from_args(parse_args(command))[0])
    return {
        "node ranks": [config.rdzv_configs["rank"] for config in configs],
        "restarts": configs[0].max_restarts,
    }


def as_told():
    """as told."""
    return nodes()


def with_ranks():
    """with both options."""
    return nodes("--node_rank={node}", "--max-restarts=3")


def check(as_told, with_ranks):
    assert as_told == {"node ranks": [0, 0], "restarts": 0}
    assert with_ranks == {"node ranks": [0, 1], "restarts": 3}


VARIANTS = (as_told, with_ranks)

if __name__ == "__main__":
    run(__file__)
