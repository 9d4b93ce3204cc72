"""Who sees which sample when: what is shared out, what is kept in step, and how each order is drawn.

Evaluation is shared out by whole batches (``sampling``), training by global batches (``sharding``).
"""
