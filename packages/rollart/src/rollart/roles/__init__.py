"""The roles of a run: what each worker process hosts, and how the driver speaks to it."""
