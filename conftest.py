"""Fixtures for every test of the repository, the services' too."""

pytest_plugins = ["tests.support.fixtures"]
