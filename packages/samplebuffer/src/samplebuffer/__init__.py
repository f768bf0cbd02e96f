"""A trajectory buffer with a hard staleness bound, whole groups, backpressure and a ledger that always balances."""
