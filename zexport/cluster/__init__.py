"""Exports by the machines of a Ray cluster: the parts of ``zexport.run.workers`` as its tasks."""
