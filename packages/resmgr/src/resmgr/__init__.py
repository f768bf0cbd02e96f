"""A resource manager over a shared metadata store: pools, affinity, fallback, leases, failover."""
