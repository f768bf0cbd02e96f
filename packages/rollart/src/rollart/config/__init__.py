"""The typed configuration of a run: schema, loading, and what keys promise together."""

from rollart.config.check import differing
from rollart.config.load import dump_config, load_config, parse_config
from rollart.config.schema import Config

__all__ = ["Config", "differing", "dump_config", "load_config", "parse_config"]
