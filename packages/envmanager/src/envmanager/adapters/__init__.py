"""Environments of other libraries as text environments. Each module needs its library and is imported by name
only.
"""
