"""One module an engine: Plan -> Command. Engine flags live here and nowhere else."""
