"""The weightsync service."""
