"""``python -m ddp_plugin``, the same as ``ddp-plugin``."""

import sys

from ddp_plugin.cli import main

if __name__ == "__main__":
    sys.exit(main())
