"""The conformance program, against a service that keeps the contract and ones that break it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from slipstream import rpc
from slipstream.conformance import ConformanceError, main, run
from slipstream.v1.reward_pb2 import SCORE_STATUS_ERROR, SCORE_STATUS_OK, Score
from slipstream.v1.reward_service_pb2 import ScoreRequest, ScoreResponse
from slipstream.v1.reward_service_pb2_grpc import RewardServiceServicer, add_RewardServiceServicer_to_server

Answer = Callable[[ScoreRequest, Any], ScoreResponse]
METADATA = '{"answer": 42}'


def good(request: ScoreRequest, context: Any) -> ScoreResponse:
    return ScoreResponse(
        scores=[
            Score(status=SCORE_STATUS_OK, value=float(item.text == "42"))
            if item.text
            else Score(status=SCORE_STATUS_ERROR, error="empty")
            for item in request.items
        ]
    )


class Servicer(RewardServiceServicer):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        await asyncio.sleep(0.01)
        return self._answer(request, context)


@contextlib.asynccontextmanager
async def serving(answer: Answer, limit: int = rpc.MAX_MESSAGE_BYTES) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", limit)])
    add_RewardServiceServicer_to_server(Servicer(answer), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def failures(answer: Answer, **options: Any) -> dict[str, str]:
    async with serving(answer, **options) as target:
        return {name: why for name, why in (await run(target, METADATA, 10)).items() if why}


async def test_a_service_that_keeps_the_contract_passes() -> None:
    assert await failures(good) == {}


def one_too_few(request: ScoreRequest, context: Any) -> ScoreResponse:
    return ScoreResponse(scores=good(request, context).scores[1:])


def no_status(request: ScoreRequest, context: Any) -> ScoreResponse:
    return ScoreResponse(scores=[Score(value=1.0)] * len(request.items))


def not_a_number(request: ScoreRequest, context: Any) -> ScoreResponse:
    return ScoreResponse(scores=[Score(status=SCORE_STATUS_OK, value=float("nan"))] * len(request.items))


def moody(request: ScoreRequest, context: Any) -> ScoreResponse:
    return ScoreResponse(scores=[Score(status=SCORE_STATUS_OK, value=random.random()) for _ in request.items])


def chokes_on_empty(request: ScoreRequest, context: Any) -> ScoreResponse:
    if not all(item.text for item in request.items):
        raise ValueError("empty")
    return good(request, context)


def chokes_on_metadata(request: ScoreRequest, context: Any) -> ScoreResponse:
    if "answer" not in request.metadata_json:
        raise KeyError("answer")
    return good(request, context)


@pytest.mark.parametrize(
    ("answer", "check", "reason"),
    [
        (one_too_few, "one_score_per_completion", "0 scores for 1 completions"),
        (no_status, "one_score_per_completion", "SCORE_STATUS_UNSPECIFIED"),
        (not_a_number, "unicode_is_scored", "value is nan; use status ERROR"),
        (moody, "a_repeated_request_gets_the_same_scores", "scores differ between repeats"),
        (moody, "scores_keep_the_order", "do not follow the completions"),
        (chokes_on_empty, "an_empty_completion_is_scored", "UNKNOWN"),
        (chokes_on_metadata, "nonsense_metadata_is_refused_or_scored", "use INVALID_ARGUMENT"),
    ],
)
async def test_a_service_that_breaks_the_contract_is_told_how(
    answer: Answer, check: str, reason: str
) -> None:
    assert reason in (await failures(answer))[check]


async def test_a_service_with_a_small_limit_fails_on_large_groups_alone() -> None:
    found = await failures(good, limit=4 * 1024**2)
    assert list(found) == ["a_large_group_is_scored"]
    assert "RESOURCE_EXHAUSTED" in found["a_large_group_is_scored"]


async def test_nobody_there_is_said_within_the_timeout() -> None:
    with pytest.raises(ConformanceError, match=r"127.0.0.1:1 does not answer within 0.5 s"):
        await run("127.0.0.1:1", METADATA, 0.5)


@pytest.mark.parametrize("metadata", ["{", "[]"])
def test_metadata_that_is_no_object_is_refused(metadata: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["127.0.0.1:1", "--metadata", metadata])
    assert caught.value.code == 2
    assert "--metadata" in capsys.readouterr().err


def test_the_exit_code_says_whether_anybody_was_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1", "--timeout", "0.2"]) == 2
    assert "does not answer" in capsys.readouterr().err
