"""A local deployment: real servers and the services as plain processes of this machine.

`jars` fetches the Java servers, `servers` starts and stops them, `stack` adds topics, bucket and the five
services, `models` prepares a model directory, `checks` says what is missing. Needs `slipstream[local]`.
"""

from slipstream.local.paths import home as home_directory
from slipstream.local.stack import LocalStack, StackOptions, client_environment

__all__ = ["LocalStack", "StackOptions", "client_environment", "home_directory"]
