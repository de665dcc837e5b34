"""plora report, with and without --serve, through the command line and over a real socket."""

import html
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plora_jax.cli import main
from tests.made_run import make_run

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("serve") / "run", count=6, steps=20)


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "plora_jax", "report", str(run), "--serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout
        said = process.stdout.readline()
        found = re.search(r"at http://127\.0\.0\.1:(\d+)/", said)
        assert found, said
        yield process, int(found[1])
        if process.poll() is None:
            process.kill()


def ask(
    port: int, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    link.putrequest(method, path, skip_host=True)
    link.putheader("Host", host or f"127.0.0.1:{port}")
    link.endheaders()
    answer = link.getresponse()
    body = answer.read().decode()
    link.close()
    return answer.status, dict(answer.getheaders()), body


def test_it_serves_the_page_and_its_news(run: Path, served: tuple[subprocess.Popen[str], int]) -> None:
    _, port = served
    status, headers, page = ask(port, "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    policy = html.unescape(page)
    assert "connect-src 'self'" in policy and "default-src 'none'" in policy
    seen = re.findall('data-live="([0-9a-f]+)"', page)[0]
    news = json.loads(ask(port, f"/state.json?seen={seen}")[2])
    assert news == {"version": seen, "page": None}
    job = sorted((run / "jobs").iterdir())[0]
    with (job / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": 0.5, "lr": 0, "grad_norm": 1, "tokens": 7, "skipped": 0}\n')
    later = news
    until = time.monotonic() + 20
    while not later["page"] and time.monotonic() < until:  # a page rests before it is made again
        later = json.loads(ask(port, f"/state.json?seen={seen}")[2])
    assert later["version"] != seen and f'data-live="{later["version"]}"' in later["page"]
    assert not (run / "report.html").exists()
    assert ask(port, "/", method="HEAD")[2] == ""


def test_nothing_else_and_nobody_else(served: tuple[subprocess.Popen[str], int]) -> None:
    _, port = served
    for path in ("/../../../../etc/passwd", "//etc/passwd", "/leaderboard.json", "/%2e%2e/", "/state.json/x"):
        assert ask(port, path)[0] == 404
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]", "0.0.0.0"):
        assert ask(port, "/", host or " ")[0] == 403
        assert ask(port, "/state.json", host or " ")[0] == 403
    for host in ("localhost:9", "LOCALHOST", "[::1]:80"):  # as through a tunnel of another port
        assert ask(port, "/", host)[0] == 200


def test_interrupting_it_ends_with_130(served: tuple[subprocess.Popen[str], int]) -> None:
    process, _ = served
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert process.stderr and process.stderr.read() == "plora report: interrupted\n"


def test_a_wide_address_is_served_with_a_warning(run: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "plora_jax",
        "report",
        str(run),
        "--serve",
        "--port",
        "0",
        "--host",
        "0.0.0.0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout and process.stderr
        port = int(re.findall(r":(\d+)/", process.stdout.readline())[0])
        assert "there is no password" in process.stderr.readline()
        assert ask(port, "/", "node-7.cluster:80")[0] == 200
        process.terminate()
        assert process.wait(20) == 143


def test_report_writes_the_file_and_says_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.time()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    assert (run / "report.html").stat().st_mtime >= started - 1
    (run / "report.html").unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}"], "is not a run directory"),
        (["{tmp}/none"], "there is no such directory"),
        (["{tmp}/none", "--serve"], "there is no such directory"),
        (["{run}", "--port", "80"], "add --serve"),
        (["{run}", "--serve", "--port", "0", "--host", "192.0.2.1"], "give another"),
        (["{run}", "--serve", "--port", "0", "--host", "no.such.host.invalid"], "give another"),
    ],
)
def test_wrong_input_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["report", *[text.format(run=run, tmp=tmp_path) for text in arguments]]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_port_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    for port in ("65536", "-1", "x", "1.5"):
        with pytest.raises(SystemExit) as caught:
            main(["report", "run", "--serve", "--port", port])
        assert caught.value.code == 2 and "is not a port" in capsys.readouterr().err
