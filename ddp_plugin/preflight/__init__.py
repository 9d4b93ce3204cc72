"""Before the first step: what each rank says about itself, what contradicts itself, and where the ranks differ."""
