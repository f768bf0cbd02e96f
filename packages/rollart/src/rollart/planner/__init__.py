"""Which configuration a set of devices should have: closed forms to start with, the simulator to judge."""
