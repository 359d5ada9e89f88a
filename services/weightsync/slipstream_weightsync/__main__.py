"""`python -m slipstream_weightsync`."""

from slipstream.service import main
from slipstream_weightsync.service import WeightSync
from slipstream_weightsync.settings import WeightsyncSettings

if __name__ == "__main__":
    main("weightsync", WeightsyncSettings, WeightSync)
