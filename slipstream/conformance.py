"""Checks that a RewardService keeps the contract: `python -m slipstream.conformance TARGET`.

Exit codes: 0 all checks passed, 1 at least one failed, 2 wrong arguments or nobody answers at the target.
"""

import argparse
import asyncio
import json
import math
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from slipstream import rpc
from slipstream.v1.reward_pb2 import SCORE_STATUS_ERROR, SCORE_STATUS_OK, Score
from slipstream.v1.reward_service_pb2 import ScoreItem, ScoreRequest, ScoreResponse
from slipstream.v1.reward_service_pb2_grpc import RewardServiceStub

_UNICODE = "Größe 🚀 \u202eabc 漢字 e\u0301 \x00\t\n"
_LARGE_ITEMS, _LARGE_CHARS = 64, 100_000


class ConformanceError(Exception):
    """What the service did against the contract."""


class Conformance:
    """The checks, against one endpoint."""

    def __init__(self, target: str, channel: grpc.aio.Channel, metadata: str, timeout_s: float) -> None:
        self._target, self._metadata, self._timeout_s = target, metadata, timeout_s
        self._stub = RewardServiceStub(channel)

    async def one_score_per_completion(self) -> None:
        """Groups of 1, 2 and 17 get as many scores, each a finite number or an error with a reason."""
        for count in (1, 2, 17):
            await self._score([f"completion {i}" for i in range(count)])

    async def scores_keep_the_order(self) -> None:
        """Reversed completions get the reversed scores."""
        texts = ["", "42", "The answer is 42.", "17", "no idea", "4 2"]
        there = await self._score(texts)
        back = await self._score(texts[::-1])
        _expect(
            list(map(_bare, there)) == list(map(_bare, back))[::-1], "scores do not follow the completions"
        )

    async def a_repeated_request_gets_the_same_scores(self) -> None:
        """The same request, three times and at once, gets equal scores."""
        request = self._request(["42", "no idea"])
        responses = await asyncio.gather(*(self._send(request) for _ in range(3)))
        found = [list(map(_bare, response.scores)) for response in responses]
        _expect(found[0] == found[1] == found[2], f"scores differ between repeats: {found}")

    async def an_empty_completion_is_scored(self) -> None:
        """A completion without text and tokens is scored or an error, and does not fail its siblings."""
        request = self._request(["42", ""])
        del request.items[1].token_ids[:]
        _check(request, await self._send(request))

    async def unicode_is_scored(self) -> None:
        """Emoji, combining marks, right-to-left marks and control characters are scored."""
        await self._score([_UNICODE, _UNICODE * 50])

    async def a_large_group_is_scored(self) -> None:
        """64 completions of 100,000 characters each (6.4 MB) fit."""
        await self._score(["x" * _LARGE_CHARS] * _LARGE_ITEMS)

    async def groups_are_scored_at_the_same_time(self) -> None:
        """16 groups at once are all scored."""
        await asyncio.gather(*(self._score([f"completion {i}", "42"]) for i in range(16)))

    async def a_call_past_its_deadline_does_no_harm(self) -> None:
        """After calls that were given no time, the next is answered as ever."""
        for _ in range(3):
            try:
                await self._stub.Score(self._request(["42"]), timeout=0.001)
            except grpc.aio.AioRpcError as error:
                code = error.code()
                _expect(
                    code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED),
                    f"a call past its deadline ended with {code.name}: {error.details()}",
                )
        await self._score(["42"])

    async def nonsense_metadata_is_refused_or_scored(self) -> None:
        """Metadata that the reward has no use for ends in INVALID_ARGUMENT, errors or scores."""
        request = self._request(["42"])
        request.metadata_json = '{"nonsense": [null]}'
        try:
            _check(request, await self._stub.Score(request, timeout=self._timeout_s))
        except grpc.aio.AioRpcError as error:
            _expect(
                error.code() is grpc.StatusCode.INVALID_ARGUMENT,
                f"ended with {error.code().name}, which is retried: {error.details()}; use INVALID_ARGUMENT",
            )
        await self._score(["42"])

    async def _score(self, texts: Sequence[str]) -> Sequence[Score]:
        request = self._request(texts)
        response = await self._send(request)
        _check(request, response)
        return list(response.scores)

    async def _send(self, request: ScoreRequest) -> ScoreResponse:
        try:
            response: ScoreResponse = await self._stub.Score(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise ConformanceError(f"{error.code().name}: {error.details()}") from None
        return response

    def _request(self, texts: Sequence[str]) -> ScoreRequest:
        group = f"conformance/{uuid.uuid4().int % 10**9}"
        return ScoreRequest(
            request_id=uuid.uuid4().hex,
            run_id="conformance",
            group_id=group,
            prompt_text="user: What is 40 + 2?",
            metadata_json=self._metadata,
            items=[
                ScoreItem(sample_id=f"{group}/{i}", text=text, token_ids=range(1, 4))
                for i, text in enumerate(texts)
            ],
        )

    def checks(self) -> list[Callable[[], Awaitable[None]]]:
        """All checks, in order."""
        return [
            self.one_score_per_completion,
            self.scores_keep_the_order,
            self.a_repeated_request_gets_the_same_scores,
            self.an_empty_completion_is_scored,
            self.unicode_is_scored,
            self.a_large_group_is_scored,
            self.groups_are_scored_at_the_same_time,
            self.a_call_past_its_deadline_does_no_harm,
            self.nonsense_metadata_is_refused_or_scored,
        ]


def _check(request: ScoreRequest, response: ScoreResponse) -> None:
    count = len(request.items)
    _expect(len(response.scores) == count, f"{len(response.scores)} scores for {count} completions")
    for score in response.scores:
        if score.status == SCORE_STATUS_ERROR:
            _expect(bool(score.error), "a score with status ERROR gives no reason in `error`")
            continue
        _expect(score.status == SCORE_STATUS_OK, "a score has no status (SCORE_STATUS_UNSPECIFIED)")
        for name, value in (("value", score.value), *score.parts.items()):
            _expect(math.isfinite(value), f"{name} is {value}; use status ERROR for what cannot be scored")


def _expect(condition: bool, failure: str) -> None:
    if not condition:
        raise ConformanceError(failure)


def _bare(score: Score) -> tuple[Any, ...]:
    return score.status, score.value, tuple(sorted(score.parts.items()))


async def run(target: str, metadata: str, timeout_s: float) -> dict[str, str]:
    """Failure by name of the check, empty where it passed.

    Raises:
        ConformanceError: nobody answers at the target.
    """
    async with rpc.make_channel(target) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), timeout_s)
        except TimeoutError:
            raise ConformanceError(f"{target} does not answer within {timeout_s:g} s") from None
        results: dict[str, str] = {}
        for check in Conformance(target, channel, metadata, timeout_s).checks():
            try:
                await check()
                results[check.__name__] = ""
            except ConformanceError as error:
                results[check.__name__] = str(error)
        return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slipstream.conformance", description=__doc__)
    parser.add_argument("target", help="gRPC target, for example 127.0.0.1:50060")
    parser.add_argument("--metadata", default='{"answer": 42}', help="JSON object that the reward expects")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds that one call may take")
    options = parser.parse_args(arguments)
    try:
        if not isinstance(json.loads(options.metadata), dict):
            parser.error("--metadata is not a JSON object")
    except ValueError as error:
        parser.error(f"--metadata is not JSON: {error}")
    try:
        results = asyncio.run(run(options.target, options.metadata, options.timeout))
    except ConformanceError as error:
        print(error, file=sys.stderr)
        return 2
    for name, failure in results.items():
        print(
            f"{'FAILED' if failure else 'ok':<7}{name.replace('_', ' ')}{': ' + failure if failure else ''}"
        )
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
