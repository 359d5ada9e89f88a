"""Slipstream: asynchronous RL post-training of language models as an event-streaming pipeline."""

__version__ = "0.1.0"
