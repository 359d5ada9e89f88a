"""Rewards over gRPC: real calls to a server in this process."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from slipstream_reward.remote import RemoteScorer
from slipstream_reward.scoring import VoidGroup

from slipstream.v1.reward_pb2 import SCORE_STATUS_OK, Score
from slipstream.v1.reward_service_pb2 import ScoreRequest, ScoreResponse
from slipstream.v1.reward_service_pb2_grpc import RewardServiceServicer, add_RewardServiceServicer_to_server
from slipstream.v1.rollout_pb2 import Completion, GrpcReward, PromptGroup, RewardSpec, RolloutGroup


class FastClock:
    """Real time, with pauses a hundred times shorter, all of them noted."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return time.monotonic() + sum(self.slept)

    def unix(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(seconds / 100)


class Endpoint(RewardServiceServicer):
    """Fails with the codes that it is given, one per call, then scores the length of each text."""

    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []
        self.requests: list[ScoreRequest] = []
        self.time_left_s: list[float] = []
        self.delays_s: list[float] = []
        self.extra = 0

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        self.requests.append(request)
        self.time_left_s.append(context.time_remaining())
        if self.delays_s:
            await asyncio.sleep(self.delays_s.pop(0))
        if self.codes:
            await context.abort(self.codes.pop(0), "not now")
        texts = [item.text for item in request.items] + ["extra"] * self.extra
        return ScoreResponse(scores=[Score(status=SCORE_STATUS_OK, value=len(t)) for t in texts])


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.fixture
async def target(endpoint: Endpoint) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_RewardServiceServicer_to_server(endpoint, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
def clock() -> FastClock:
    return FastClock()


@pytest.fixture
async def make(clock: FastClock) -> AsyncIterator[Callable[[float], RemoteScorer]]:
    made: list[RemoteScorer] = []

    def make(retry_s: float) -> RemoteScorer:
        made.append(RemoteScorer(clock, random.Random(0), retry_s=retry_s))
        return made[-1]

    yield make
    for scorer in made:
        await scorer.close()


def spec(target: str, timeout_s: float = 10.0) -> RewardSpec:
    return RewardSpec(name="length", timeout_s=timeout_s, grpc=GrpcReward(target=target))


def rollout() -> RolloutGroup:
    texts = ["a", "bcd", ""]
    prompt = PromptGroup(run_id="demo", group_id="demo/7", text="?", num_samples=len(texts))
    completions = [Completion(sample_id=f"demo/7/{i}", text=text) for i, text in enumerate(texts)]
    return RolloutGroup(prompt=prompt, completions=completions)


async def test_a_group_is_scored_in_one_call_with_a_deadline(
    endpoint: Endpoint, target: str, make: Callable[[float], RemoteScorer]
) -> None:
    outcomes = await make(60).score(spec(target), rollout())
    assert [o.value for o in outcomes] == [1, 3, 0]
    assert len(endpoint.requests) == 1
    assert 5 < endpoint.time_left_s[0] <= 10


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED],
)
async def test_an_endpoint_that_is_away_is_tried_again_with_growing_pauses(
    endpoint: Endpoint,
    target: str,
    clock: FastClock,
    make: Callable[[float], RemoteScorer],
    code: grpc.StatusCode,
) -> None:
    endpoint.codes = [code] * 5
    outcomes = await make(60).score(spec(target), rollout())
    assert [o.value for o in outcomes] == [1, 3, 0]
    assert len({r.request_id for r in endpoint.requests}) == 1
    assert len(endpoint.requests) == 6
    assert [round(s / 0.2) for s in clock.slept] == pytest.approx([1, 2, 4, 8, 16], rel=0.3)


async def test_retries_end_and_the_group_is_void_with_the_reason(
    endpoint: Endpoint, target: str, clock: FastClock, make: Callable[[float], RemoteScorer]
) -> None:
    endpoint.codes = [grpc.StatusCode.UNAVAILABLE] * 100
    with pytest.raises(VoidGroup, match=rf"{target}: UNAVAILABLE: not now"):
        await make(20).score(spec(target), rollout())
    assert 10 < sum(clock.slept) <= 25


async def test_a_call_that_takes_too_long_is_made_again(
    endpoint: Endpoint, target: str, make: Callable[[float], RemoteScorer]
) -> None:
    endpoint.delays_s = [5.0]
    assert [o.value for o in await make(60).score(spec(target, timeout_s=0.3), rollout())] == [1, 3, 0]
    assert len(endpoint.requests) == 2


async def test_an_invalid_argument_voids_at_once(
    endpoint: Endpoint, target: str, make: Callable[[float], RemoteScorer]
) -> None:
    endpoint.codes = [grpc.StatusCode.INVALID_ARGUMENT]
    with pytest.raises(VoidGroup, match="INVALID_ARGUMENT: not now"):
        await make(60).score(spec(target), rollout())
    assert len(endpoint.requests) == 1


async def test_any_other_failure_gets_one_more_try(
    endpoint: Endpoint, target: str, make: Callable[[float], RemoteScorer]
) -> None:
    endpoint.codes = [grpc.StatusCode.INTERNAL]
    assert len(await make(60).score(spec(target), rollout())) == 3
    endpoint.codes = [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL]
    with pytest.raises(VoidGroup, match="INTERNAL"):
        await make(60).score(spec(target), rollout())


async def test_too_many_scores_void_the_group(
    endpoint: Endpoint, target: str, make: Callable[[float], RemoteScorer]
) -> None:
    endpoint.extra = 1
    with pytest.raises(VoidGroup, match="returned 4 scores for 3 completions"):
        await make(60).score(spec(target), rollout())


async def test_nobody_at_the_target_voids_after_the_retries(make: Callable[[float], RemoteScorer]) -> None:
    with pytest.raises(VoidGroup, match=r"127.0.0.1:1: UNAVAILABLE"):
        await make(3).score(spec("127.0.0.1:1"), rollout())
