"""The strategy: Lightning's DDPStrategy with the parts above put in its seams.

Each file adds one thing to the class before it: ``group`` the process group, ``preflight`` the comparison of ranks
before the first step, ``reductions`` what ranks bring to a collective, ``wrapping`` the wrap that follows the model,
``averaging`` ranks that train alone and meet, ``logical`` steps that do not depend on the number of processes,
``checkpoint_io`` files with one outcome for all ranks, ``checkpoints`` what a checkpoint says of its run, ``stopping``
one last step for all ranks, ``supervised`` one end for all ranks; ``custom`` is what a person writes.
"""

from ddp_plugin.strategy.custom import CustomDDPStrategy, DataLoaderTransform, register_strategies

__all__ = ["CustomDDPStrategy", "DataLoaderTransform", "register_strategies"]
