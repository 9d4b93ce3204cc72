"""The commands of ``ddp-plugin``: each reads its arguments, calls one room of the package, and prints."""
