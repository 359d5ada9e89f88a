"""Weight sync without engines: manifests, planning, publishing and pulling."""

from slipstream.weights.publisher import Published, Publisher
from slipstream.weights.puller import Pulled, Puller

__all__ = ["Published", "Publisher", "Pulled", "Puller"]
