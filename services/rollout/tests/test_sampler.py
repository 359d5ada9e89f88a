"""Labels, spans and request checks."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_rollout.engine import Sampling, Span, add_token, check_request, end_tokens, find_model
from slipstream_rollout.sampler import make_label, read_label

from slipstream.errors import ConfigError
from slipstream.v1.common_pb2 import Version

run_ids = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)


@given(run_ids, st.integers(0, 10**6), st.integers(0, 10**9))
def test_a_label_says_run_and_version(run_id: str, epoch: int, number: int) -> None:
    version = Version(epoch=epoch, number=number)
    assert read_label(make_label(run_id, version)) == (run_id, version)


def test_base_weights_belong_to_no_run() -> None:
    assert read_label("") == ("", Version())


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_spans_tile_the_completion_and_neighbours_differ(labels: list[str]) -> None:
    spans: list[Span] = []
    for position, label in enumerate(labels):
        add_token(spans, label, position)
    assert [label for s in spans for label in [s.label] * (s.end - s.start)] == labels
    assert all(a.end == b.start and a.label != b.label for a, b in itertools.pairwise(spans))


@given(
    st.lists(st.integers(-2, 12), max_size=8),
    st.integers(-1, 3),
    st.builds(Sampling, st.integers(-1, 8), st.floats(), st.none(), st.tuples(st.integers(-1, 11))),
)
def test_only_what_fits_the_model_passes(prompt: list[int], n: int, sampling: Sampling) -> None:
    fits = (
        0 < len(prompt) <= 10 - sampling.max_tokens
        and n >= 1
        and sampling.max_tokens >= 1
        and (sampling.temperature == 0 or 0.01 <= sampling.temperature <= 100)
        and all(0 <= t < 10 for t in (*prompt, *sampling.stop_token_ids))
    )
    try:
        check_request(prompt, n, sampling, max_len=10, vocab_size=10)
    except ConfigError:
        assert not fits
    else:
        assert fits


def test_the_model_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SLIPSTREAM_ROLLOUT_MODEL"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        (
            {"generation_config.json": '{"eos_token_id": [2, 7]}', "config.json": '{"eos_token_id": 1}'},
            {2, 7},
        ),
        ({"generation_config.json": "{}", "config.json": '{"eos_token_id": 1}'}, {1}),
        ({"config.json": "{}"}, set()),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_first(
    tmp_path: Path, files: dict[str, str], ids: set[int]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert end_tokens(tmp_path) == ids
