"""`python -m slipstream.cli`, the same as `slipstream`."""

from slipstream.cli import app

if __name__ == "__main__":
    app(prog_name="slipstream")
