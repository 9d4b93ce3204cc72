"""What a run will cost before it is started: memory, bytes on the wire, the length of a step, and how it scales."""
