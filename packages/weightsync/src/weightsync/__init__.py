"""Bucketized, versioned, transactional weight publication and pull."""
