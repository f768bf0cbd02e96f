"""Disaggregated, multi-task agentic RL training for language models."""
