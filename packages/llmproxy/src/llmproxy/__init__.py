"""A trajectory-level gateway over inference workers: affinity routing, suspend/update/resume, partial generations continued."""
