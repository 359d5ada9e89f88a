"""Set-up steps: `python -m slipstream.local fetch` gets the servers' jars, `lock` pins them anew."""

import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.local import jars, paths


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        match list(arguments):
            case ["fetch"]:
                for server in jars.ROOTS:
                    print(f"{server}: {len(jars.ensure(server, paths.cache()))} jars in place", flush=True)
            case ["lock"]:
                jars.lock(Path(jars.__file__).with_name("jars.json"))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except SlipstreamError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
