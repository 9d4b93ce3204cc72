"""What DistributedDataParallel is given, and what becomes of it while a model changes or a run is resumed."""
