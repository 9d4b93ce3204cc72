"""Training over a slow link: two hosts made of network namespaces, one process in each, a rate limit between them.

Reading order: ``hosts`` (the link and the processes), ``wire`` (what crossed it), ``workload`` (what is trained),
``variants`` (in which ways), ``clock`` (for how long), ``training`` (the loops), ``costs`` (the cost model), ``job``
and ``worker`` (inside the processes), ``campaign`` (around them), ``summary`` and ``report`` (what came out).
"""
