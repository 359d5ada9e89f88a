"""What becomes of outcomes: sums, errors, void groups."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_reward.remote import score_request
from slipstream_reward.scoring import (
    Outcome,
    VoidGroup,
    check,
    clean,
    combine,
    outcome_of,
    prompt_fields,
    timeout_of,
)

from slipstream.v1.reward_pb2 import SCORE_STATUS_ERROR, SCORE_STATUS_OK, Score
from slipstream.v1.rollout_pb2 import (
    ChatMessage,
    ChatPrompt,
    Completion,
    GrpcReward,
    PromptGroup,
    RewardSpec,
    RolloutGroup,
)

OUTCOMES = st.one_of(
    st.builds(Outcome, st.floats(-1e6, 1e6)),
    st.builds(lambda e: Outcome(error=e), st.text(st.characters(exclude_categories=["Cs"]), min_size=1)),
)


def spec(name: str = "reward", weight: float = 1.0) -> RewardSpec:
    return RewardSpec(name=name, weight=weight, grpc=GrpcReward(target="127.0.0.1:1"))


def rollout(*texts: str, rewards: list[RewardSpec] | None = None) -> RolloutGroup:
    prompt = PromptGroup(
        run_id="demo",
        group_id="demo/0",
        num_samples=len(texts),
        text="2+2?",
        rewards=[spec()] if rewards is None else rewards,
    )
    completions = [Completion(sample_id=f"demo/0/{i}", text=t, token_ids=[1, 2]) for i, t in enumerate(texts)]
    return RolloutGroup(prompt=prompt, completions=completions)


@given(st.lists(st.tuples(OUTCOMES, OUTCOMES), min_size=1), st.floats(-10, 10), st.floats(-10, 10))
def test_a_completion_has_the_weighted_sum_or_an_error_and_never_a_made_up_number(
    pairs: list[tuple[Outcome, Outcome]], first: float, second: float
) -> None:
    specs = [spec("a", first), spec("b", second)]
    failed = [any(o.error for o in pair) for pair in pairs]
    outcomes = [list(each) for each in zip(*pairs, strict=True)]
    if all(failed):
        with pytest.raises(VoidGroup, match="no completion could be scored"):
            combine(specs, outcomes)
        return
    scores = combine(specs, outcomes)
    assert [s.status == SCORE_STATUS_ERROR for s in scores] == failed
    for score, (a, b) in zip(scores, pairs, strict=True):
        if score.status == SCORE_STATUS_OK:
            expected = first * a.value + second * b.value
            assert math.isclose(score.value, expected, abs_tol=1e-6)
            assert score.parts == {"a": a.value, "b": b.value}
        else:
            assert score.error
            assert not score.parts


def test_parts_keep_their_names_alone_and_get_the_rewards_in_company() -> None:
    outcome = Outcome(1.5, {"right": 1.0, "form": 0.5})
    assert combine([spec("task")], [[outcome]])[0].parts == {"right": 1.0, "form": 0.5}
    assert combine([spec("task")], [[Outcome(2.0)]])[0].parts == {"task": 2.0}
    both = combine([spec("task"), spec("style")], [[outcome], [Outcome(1.0)]])[0]
    assert both.parts == {"task": 1.5, "task/right": 1.0, "task/form": 0.5, "style": 1.0}


def test_an_overflowing_sum_is_an_error() -> None:
    scores = combine([spec("a", 10.0)], [[Outcome(1e308), Outcome(1.0)]])
    assert [s.status for s in scores] == [SCORE_STATUS_ERROR, SCORE_STATUS_OK]
    assert "overflows" in scores[0].error


def test_an_error_names_its_reward_when_there_are_several() -> None:
    scores = combine([spec("a"), spec("b")], [[Outcome(1), Outcome(1)], [Outcome(error="away"), Outcome(1)]])
    assert scores[0].error == "b: away"


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (Score(), "the reward service gave no reason"),
        (Score(value=1.0), "the reward service gave no reason"),
        (Score(status=SCORE_STATUS_ERROR, error="no answer"), "no answer"),
        (Score(status=SCORE_STATUS_OK, value=math.nan), "value = nan"),
        (Score(status=SCORE_STATUS_OK, value=1, parts={"x": math.inf}), "x = inf"),
    ],
)
def test_a_remote_score_that_is_no_finite_number_is_an_error(score: Score, error: str) -> None:
    assert error in outcome_of(score).error


def test_a_group_that_is_not_fit_is_void_with_the_reason() -> None:
    half = rollout("a", "b")
    half.prompt.num_samples = 3
    nowhere = RewardSpec(name="x")
    cases = [
        (half, "2 completions, 3 expected"),
        (rollout(), "0 completions, 0 expected"),
        (rollout("a", rewards=[]), "names no reward"),
        (rollout("a", rewards=[nowhere]), "'x' says neither a Python function nor a gRPC target"),
        (rollout("a", rewards=[spec(weight=math.nan)]), "has the weight nan"),
        (rollout("a", rewards=[spec(), spec()]), "two rewards are called 'reward'"),
    ]
    for group, reason in cases:
        with pytest.raises(VoidGroup, match=reason):
            check(group)
    assert check(rollout("a", "b")) == [spec()]


@pytest.mark.parametrize("metadata", ["{", "[1]", "null", '"x"'])
def test_metadata_that_is_no_object_makes_a_group_void(metadata: str) -> None:
    with pytest.raises(VoidGroup, match="metadata_json"):
        prompt_fields(PromptGroup(metadata_json=metadata))


def test_a_request_id_depends_on_the_work_and_on_nothing_else() -> None:
    group = rollout("a", "b")
    assert score_request(spec(), group) == score_request(spec(), rollout("a", "b"))
    ids = {
        score_request(s, g).request_id
        for s, g in [(spec(), group), (spec("other"), group), (spec(), rollout("a", "c"))]
    }
    assert len(ids) == 3


def test_a_request_holds_the_chat_as_text_and_all_completions() -> None:
    group = rollout("a", "b")
    turns = [ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content="Ho")]
    group.prompt.chat.CopyFrom(ChatPrompt(messages=turns))
    request = score_request(spec(), group)
    assert request.prompt_text == "user: Hi\nassistant: Ho"
    assert request.metadata_json == "{}"
    assert [(i.sample_id, i.text, list(i.token_ids)) for i in request.items] == [
        ("demo/0/0", "a", [1, 2]),
        ("demo/0/1", "b", [1, 2]),
    ]


def test_a_timeout_that_is_not_set_is_half_a_minute() -> None:
    assert timeout_of(RewardSpec()) == 30
    assert timeout_of(RewardSpec(timeout_s=1.5)) == 1.5


@given(st.text())
def test_any_error_text_fits_a_score(text: str) -> None:
    Score(error=clean(text)).SerializeToString()
