"""The real control plane on virtual time against simulated devices."""
