"""`python -m slipstream_monitor`."""

from slipstream.service import main
from slipstream_monitor.service import Monitor
from slipstream_monitor.settings import MonitorSettings

if __name__ == "__main__":
    main("monitor", MonitorSettings, Monitor)
