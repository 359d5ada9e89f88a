"""A reward worker: a process of its own that runs a recipe's reward function.

Started as `python -m slipstream_reward.worker BYTES` (of address space that it may take; 0: no limit). It
reads requests from stdin and writes one answer to each on stdout, as frames: length (4 bytes, big-endian),
then JSON. What the recipe prints goes to stderr. A worker serves one bundle for life, since two bundles may
hold modules of the same name. It imports next to nothing itself.

    {"load": {"zip": "/tmp/x/ab12.zip", "module": "recipe", "function": "reward"}}
        -> {"kind": "completion" | "group" | "async"} or {"error": "..."}
    {"score": {"prompt": {...}, "completions": [{...}, ...], "timeout_s": 30.0}}
        -> {"results": [{"value": 1.0, "parts": {}} | {"error": "..."}, ...]}
"""

import asyncio
import contextlib
import json
import os
import queue
import resource
import signal
import sys
import threading
from typing import BinaryIO

from slipstream.recipe.call import Json, LoadError, RewardFunction, describe


def main() -> None:
    if limit := int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    requests, responses = _take_stdio()
    pending: queue.SimpleQueue[Json] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, pending), daemon=True).start()
    _offer_to_oom_killer()
    with asyncio.Runner() as runner:
        function: RewardFunction | None = None
        while True:
            request = pending.get()
            if "load" in request:
                function, answer = _load(request["load"])
            else:
                assert function is not None, "load comes before score"
                answer = {"results": function.score(runner, **request["score"])}
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            write_frame(responses, answer)


def _take_stdio() -> tuple[BinaryIO, BinaryIO]:
    """Keeps stdin and stdout for frames; the recipe gets an empty stdin, and its stdout is stderr."""
    requests, responses = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, responses


def _read(requests: BinaryIO, pending: "queue.SimpleQueue[Json]") -> None:
    while (request := read_frame(requests)) is not None:
        pending.put(request)
    # The service is gone: end at once, with whatever the recipe has started, even in the middle of a call.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _offer_to_oom_killer() -> None:
    """When memory runs out, a worker is to go rather than the service."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")


def read_frame(stream: BinaryIO) -> Json | None:
    """Next frame, None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    body = stream.read(int.from_bytes(header, "big"))
    return dict(json.loads(body))


def write_frame(stream: BinaryIO, message: Json) -> None:
    """Writes one frame."""
    body = json.dumps(message).encode()
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def _load(request: Json) -> "tuple[RewardFunction | None, Json]":
    try:
        function = RewardFunction.load(request["zip"], request["module"], request["function"])
    except LoadError as error:
        return None, {"error": str(error)}
    except BaseException as error:
        return None, {"error": f"importing {request['module']}.py: {describe(error, request['zip'])}"}
    return function, {"kind": function.kind}


if __name__ == "__main__":
    main()
