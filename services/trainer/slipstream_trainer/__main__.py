"""`python -m slipstream_trainer`"""

from slipstream.service import main
from slipstream_trainer.service import TrainerService
from slipstream_trainer.settings import TrainerSettings

if __name__ == "__main__":
    main("trainer", TrainerSettings, TrainerService)
