"""One lightweight controller per environment: trajectory-level rollout, redundancy, overlapped rewards."""
