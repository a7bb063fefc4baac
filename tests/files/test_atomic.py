"""Files are the new ones or the old ones, whatever goes wrong."""

import os
import stat
import threading

import pytest

from mocha_jax._files import atomic


def test_a_file_is_made_and_replaced_and_nothing_else_is_left(tmp_path):
    for content in (b"first", b"second"):
        atomic.write(tmp_path / "a.bin", content)
        assert (tmp_path / "a.bin").read_bytes() == content
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_what_was_there_survives_a_failure(tmp_path, monkeypatch, error):
    def fails(*_):
        raise error

    (tmp_path / "a.bin").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(type(error)):
        atomic.write(tmp_path / "a.bin", b"new")
    assert os.listdir(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"old"


def test_a_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/a.bin")
    for content in (b"through a link to nothing", b"through a link to a file"):
        atomic.write(link, content)
        assert link.is_symlink()
        assert (tmp_path / "folder" / "a.bin").read_bytes() == content


def test_a_pipe_is_written_into(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    atomic.make_writable(pipe)
    atomic.write(pipe, b"content")
    reader.join(timeout=10)
    assert got == [b"content"]
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_a_folder_is_refused(tmp_path):
    for act in (atomic.make_writable, lambda path: atomic.write(path, b"")):
        with pytest.raises(IsADirectoryError):
            act(tmp_path)
    assert tmp_path.is_dir()


def test_whether_it_could_be_written_is_known_before(tmp_path):
    atomic.make_writable(tmp_path / "deep" / "down" / "a.bin")
    assert os.listdir(tmp_path / "deep" / "down") == []
    (tmp_path / "file").write_bytes(b"old")
    atomic.make_writable(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"
    with pytest.raises(OSError, match="file"):
        atomic.make_writable(tmp_path / "file" / "a.bin")
