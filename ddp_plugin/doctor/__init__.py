"""What there is on this machine, whether it works, and what to change: the parts of ``ddp-plugin doctor``."""
