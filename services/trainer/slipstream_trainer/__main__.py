"""`python -m slipstream_trainer`"""

import os

# Threads that wait for each other sleep instead of spinning. On a machine shared with an engine, a spinning
# thread takes the core from the very one it waits for. Read when torch is loaded, so it is set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from slipstream.service import main
from slipstream_trainer.service import TrainerService
from slipstream_trainer.settings import TrainerSettings

if __name__ == "__main__":
    main("trainer", TrainerSettings, TrainerService)
