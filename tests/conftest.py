"""What holds for every test."""

from hypothesis import HealthCheck, settings

# On a busy machine a slow example says nothing of the code: time is measured in benchmarks, never by a test.
settings.register_profile("rollart", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rollart")
