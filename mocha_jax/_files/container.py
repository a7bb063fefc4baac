"""The one form of the library's files: arrays, and a text that says what they are. Never a pickle.

A file is an archive that NumPy reads (npz). Its first entry, ``about.json``, is a text in JSON: the name of the format,
its version, the kind of the file, what files of that kind say, dtype and shape of every array by name, and a digest of
all that and of the arrays. The arrays follow, not compressed, so that none is larger in memory than on the disk.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any, Self

import numpy as np

from mocha_jax._core import check
from mocha_jax._files.fingerprint import fingerprint, plain

Arrays = dict[str, np.ndarray]
About = dict[str, Any]  # as JSON gives it back

_FORMAT, _VERSION, _ABOUT = "mocha_jax", 1, "about.json"

# How the end of an archive begins, and its bytes where nothing stands behind it.
_END, _END_SIZE = b"PK\x05\x06", 22


class Unreadable(ValueError):
    """A file that is not of the kind that is wanted: a sentence without its end, for readers to add the remedy."""


@dataclasses.dataclass(frozen=True, eq=False)
class Container:
    """The contents of a file.

    Args:
      arrays: by name.
      about: the text.
    """

    arrays: Arrays
    about: About

    @classmethod
    def of(cls, kind: str, arrays: Arrays, about: Mapping[str, object]) -> Self:
        """Describe arrays.

        Args:
          kind: of the file.
          arrays: of numbers or booleans, by name.
          about: what else there is to say, in values that JSON knows.
        """
        forms = {name: form(array) for name, array in arrays.items()}
        text = {"format": _FORMAT, "version": _VERSION, "kind": kind, **about, "arrays": forms}
        return cls(arrays, text | {"digest": _digest(text, arrays)})

    def write(self, to: IO[bytes]) -> None:
        """Write it to an open file."""
        with zipfile.ZipFile(to, "w") as archive:
            with archive.open(_ABOUT, "w") as entry:
                entry.write(json.dumps(self.about).encode())
            for name, array in self.arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, plain(array), allow_pickle=False)

    def to_bytes(self) -> bytes:
        """Return what `write` writes."""
        content = io.BytesIO()
        self.write(content)
        return content.getvalue()


def read(file: IO[bytes], kind: str, source: str, wanted: Callable[[str], bool] = lambda name: True) -> Container:
    """Read an open file. One that is made to do harm can do no more than be refused.

    Args:
      file: it.
      kind: that it must be of.
      source: its name in errors.
      wanted: tells by name which arrays to read; the digest is checked where it is all of them.

    Raises:
      Unreadable: it is damaged, of a later version or of another kind.
      OSError: it cannot be read.
    """
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _END_SIZE, 0))
        ends = file.read(len(_END)) == _END
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if not ends or entries[0].header_offset:
                raise ValueError("something stands before it or behind it")
            if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
                raise ValueError("unpacked it might be of any size")
            about = json.loads(archive.read(_ABOUT))
            version, found, forms = about["version"], about["kind"], about["arrays"]
            if about["format"] != _FORMAT or type(version) is not int or version < 1:
                raise ValueError("it is of no version of this format")
            if version > _VERSION:
                said = check.shown(version)
                raise Unreadable(f"{source} is of version {said}, and this library reads up to {_VERSION}")
            if found != kind:
                raise Unreadable(f"{source} is of the kind {check.shown(found)}, and {kind!r} is wanted")
            if [entry.filename for entry in entries] != [_ABOUT, *(f"{name}.npy" for name in forms)]:
                raise ValueError("it does not hold what it says it holds")
            arrays = {name: _array(archive, name, *forms[name]) for name in forms if wanted(name)}
        if len(arrays) == len(forms) and about["digest"] != _digest(about, arrays):
            raise Unreadable(f"{source} is damaged: its digest does not match")
    except (OSError, Unreadable):
        raise
    except Exception as error:  # readers of zip, npy and JSON raise many kinds for damaged bytes
        raise Unreadable(f"{source} is no file of this library, or it is damaged") from error
    return Container(arrays, about)


def load(path: str | os.PathLike[str], kind: str, wanted: Callable[[str], bool] = lambda name: True) -> Container:
    """Read a file by its path; arguments and errors as `read`."""
    with open(path, "rb") as file:
        return read(file, kind, str(path), wanted)


def form(array: np.ndarray) -> list[object]:
    """Return dtype and shape as JSON gives them back."""
    return [array.dtype.name, list(array.shape)]


def _array(archive: zipfile.ZipFile, name: str, dtype: str, shape: list[int]) -> np.ndarray:
    with archive.open(f"{name}.npy") as entry:
        array = np.lib.format.read_array(entry, allow_pickle=False)
    if np.dtype(dtype).kind == "V":  # one of those that NumPy's files do not know
        array = array.view(dtype)
    if form(array) != [dtype, shape]:
        raise ValueError(f"{name} is not what it is said to be")
    return array


def _digest(about: Mapping[str, object], arrays: Arrays) -> str:
    """Digest of a text but for its own digest, and of the arrays."""
    text = {name: value for name, value in about.items() if name != "digest"}
    return fingerprint(json.dumps(text, allow_nan=False), arrays)
