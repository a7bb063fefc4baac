"""Files of the library, opened and written anew with something else in them, as a hostile sender would."""

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from mocha_jax._files import container


def opened(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a file says, and its arrays."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        parts = {name: file[name] for name in file.files}
    return json.loads(parts.pop("about.json")), parts


def closed(about: object, arrays: dict[str, Any], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The file that says that of these arrays, true or not; a text is written as it is."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("about.json", about if isinstance(about, str) else json.dumps(about))
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.asarray(array))
    return out.getvalue()


def rewritten(content: bytes, change: Callable[[dict[str, Any], dict[str, Any]], object], forms: bool = True) -> bytes:
    """The file after a change of what it says and of its arrays, with the digest of that.

    Args:
      content: of the file.
      change: of both, in place.
      forms: whether it says the truth about dtypes and shapes; else what `change` lets it say.
    """
    about, arrays = opened(content)
    change(about, arrays)
    if forms:
        about["arrays"] = {name: container.form(np.asarray(array)) for name, array in arrays.items()}
    return closed(about | {"digest": container._digest(about, arrays)}, arrays)
