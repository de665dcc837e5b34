"""Files of a run appear whole or not at all, and one process at a time writes them."""

import json
import multiprocessing
import os

import pytest

from plora_jax.engine.rundir import JsonLines, open_run, write_atomic, write_json
from plora_jax.errors import UserError


def test_atomic_write_leaves_no_temporary(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": float("nan"), "y": [float("inf"), 1.5]})
    assert json.loads(path.read_text()) == {"x": None, "y": [None, 1.5]}
    write_atomic(path, "two")
    assert path.read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_is_no_file_of_its_own_is_written_through(tmp_path):
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDWR)
    for path in (pipe, link):
        write_atomic(path, "text")
    assert os.read(reader, 99) == b"text" and pipe.is_fifo()
    assert file.read_text() == "text" and link.is_symlink()
    os.close(reader)


def test_torn_tail_is_cut_before_the_next_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(path)
    lines.append({"step": 2})
    lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_damaged_file_counts_as_absent(tmp_path, content):
    with open_run(tmp_path / "run", resume=False) as run:
        (run.path / "job.json").write_bytes(content)
        assert run.read_json("job.json") is None


@pytest.mark.parametrize("resume", [False, True])
def test_used_directory_is_refused_unless_resumed(tmp_path, resume):
    (tmp_path / "something").write_text("mine")
    if resume:
        (tmp_path / "sweep.yaml").write_text("")  # the user's own, beside the data
        with pytest.raises(UserError, match="not by a sweep"), open_run(tmp_path, resume=True):
            pass
        (tmp_path / ".lock").write_text("")
        with open_run(tmp_path, resume=True) as run:
            run.event("hello", n=1)
        assert json.loads((tmp_path / "events.jsonl").read_text())["event"] == "hello"
    else:
        with pytest.raises(UserError, match="already used"), open_run(tmp_path, resume=False):
            pass
        assert [p.name for p in tmp_path.iterdir()] == ["something"]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="this is a file"), open_run(tmp_path / "file", resume=True):
        pass


def _try_to_open(path, queue):
    try:
        with open_run(path, resume=True):
            queue.put("opened")
    except UserError as error:
        queue.put(str(error))


def test_a_second_process_is_refused(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with open_run(tmp_path / "run", resume=False):
        other = context.Process(target=_try_to_open, args=(tmp_path / "run", queue))
        other.start()
        assert "another process" in queue.get(timeout=60)
        other.join()
