"""Whether the hub answers is known in seconds, whatever the network does."""

import socket
import threading
import time
from pathlib import Path

import pytest

from plora_jax.hub import hub_host, why_unreachable
from tests.refusal import refused
from tests.tiny import write_sweep


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("", ("huggingface.co", 443)),
        ("https://hub.example", ("hub.example", 443)),
        ("http://hub.example/path", ("hub.example", 80)),
        ("http://127.0.0.1:8080", ("127.0.0.1", 8080)),
    ],
)
def test_where_the_hub_is(endpoint: str, host: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert hub_host() == host


def test_a_hub_that_listens_is_reachable_and_one_that_does_not_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert why_unreachable() == ""
    assert why_unreachable() == "127.0.0.1 cannot be reached: Connection refused"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert why_unreachable() == "HF_HUB_OFFLINE is set"


def test_a_name_server_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(*_: object, **__: object) -> None:
        over.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    started = time.perf_counter()
    assert why_unreachable(0.2) == "huggingface.co gives no answer within 0 s"
    assert time.perf_counter() - started < 10
    over.set()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:99999", f"https://{'a' * 70}.example"])
def test_an_endpoint_that_cannot_be_one_is_said_at_once(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    started = time.perf_counter()
    assert f"{hub_host()[0]} cannot be reached: " in why_unreachable(10)
    assert time.perf_counter() - started < 10


def test_models_and_data_that_only_the_hub_has_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")  # closed again below
    started = time.perf_counter()
    sweep = write_sweep(tmp_path, model="someone/some-model")
    assert "Connection refused" in refused(tmp_path, "plan", sweep)
    sweep = write_sweep(tmp_path, data={"train": "owner/rows"})
    assert "Connection refused" in refused(tmp_path, "plan", sweep, "--devices", "cpu-16GB")
    assert time.perf_counter() - started < 20  # the client's own retries take 23 s each
