"""The ClientApp of a node."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from mocha_jax.flower import _worker_socket
from mocha_jax.flower._records import Arrays, Header, as_known, from_record, to_record

# The logger of Flower, whose lines go where those of the SuperNode do.
_log = logging.getLogger("flwr")

# The entries that the node-config must have.
_TASK, _STATE = "task", "state"


def client_app(
    make_node: str | Callable[[Mapping[str, bool | int | float | str]], object], *, worker: bool = True,
    idle_seconds: float = 900.0,
) -> ClientApp:  # fmt: skip
    """Make the ClientApp of nodes whose work is that of a `mocha_jax.federated.Node`.

    The node-config of every SuperNode names its ``task``, a whole number from 0, and a folder ``state`` for what the
    node keeps: ``--node-config 'task=3 state="/var/lib/mocha/3" ...'``; other entries are for `make_node`. A
    message's work is done by a worker of the node, a process that compiles once, listens at a Unix socket in that
    folder, and ends when it is idle for long or its SuperNode is gone. It writes the node's state to the disk
    before it answers, with the message and its answer: if an answer is lost, the repeated message gets the same
    answer, and no work is done twice. If it is killed, the next worker continues from there.

    Without a worker, or without Unix sockets, the message's own process does the work, with the same files.
    It also writes Flower's ``context.state``, but never reads it: that is in the SuperNode's memory and lost when the
    SuperNode restarts, while the duals on the disk are still those that the server counts on.

    An exception on a node is written to the node's own log; the server gets only its class, since texts of exceptions
    may contain data. JAX's compiled programs are cached beside the state unless ``JAX_COMPILATION_CACHE_DIR`` is set.

    Args:
      make_node: the function that makes the node, of the node-config, as ``"package.module:function"``. Only the
        worker imports the module, the only one that needs JAX.
      worker: whether to use one.
      idle_seconds: a worker ends after this time without a message.
    """
    name = _name(make_node)
    if not isinstance(worker, bool):
        raise ValueError(f"client_app: worker must be True or False, got {_shown(worker)}.")
    number = isinstance(idle_seconds, int | float | np.integer | np.floating)
    number = number and not isinstance(idle_seconds, bool | np.timedelta64)
    if not number or not 0 < idle_seconds < 1e9:
        raise ValueError(
            f"client_app: idle_seconds must be a number of seconds in (0, 1e9), got {_shown(idle_seconds)}."
        )
    app = ClientApp()

    @app.query()
    def which(message: Message, context: Context) -> Message:
        return _safely(message, lambda: ({"what": "task", "task": _task(context.node_config)}, {}))

    @app.train()
    def work(message: Message, context: Context) -> Message:
        def answer() -> tuple[Header, Arrays]:
            header, arrays = from_record(message.content)
            setup = _setup(name, context.node_config, float(idle_seconds))
            folder = _folder(context.node_config)
            _cache(os.path.dirname(folder))
            if worker and _worker_socket.possible():
                return _worker_socket.ask(folder, setup, header, arrays, float(message.metadata.ttl))
            return _here(folder, setup, header, arrays, context.state)

        return _safely(message, answer)

    return app


def _name(make_node: object) -> str:
    """A function's module and name, as text."""
    if isinstance(make_node, str):
        name = make_node
    else:
        name = f"{getattr(make_node, '__module__', '')}:{getattr(make_node, '__qualname__', '')}"
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError(
            "client_app: make_node must be a text 'package.module:function' or a function of a module, "
            f"got {_shown(make_node)}."
        )
    return name


def _shown(value: object) -> str:
    """A value in a message, as text; of one that is not plain its type."""
    return repr(value) if isinstance(value, str | bool | int | float) else f"a value of {type(value).__name__}"


def _safely(message: Message, answer: Callable[[], tuple[Header, Arrays]]) -> Message:
    """The reply; of an exception its class alone."""
    try:
        return Message(to_record(*answer()), reply_to=message)
    except Exception as error:
        _log.exception("client_app: a message could not be answered.")
        return Message(to_record({"what": "failed", "kind": type(error).__name__}), reply_to=message)


def _task(config: Mapping[str, object]) -> int:
    task = config.get(_TASK)
    if isinstance(task, bool) or not isinstance(task, int) or task < 0:
        raise ValueError(f"client_app: the node-config must have task=..., a whole number >= 0, got {task!r}.")
    return task


def _folder(config: Mapping[str, object]) -> str:
    state = config.get(_STATE)
    if not isinstance(state, str) or not state:
        raise ValueError(f'client_app: the node-config must have state="...", a folder for the node, got {state!r}.')
    os.makedirs(state, exist_ok=True)
    return _worker_socket.private_folder(os.path.join(os.path.abspath(state), f"task-{_task(config)}"))


def _setup(name: str, config: Mapping[str, object], idle_seconds: float) -> _worker_socket.Setup:
    top = name.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(top)  # imports nothing
    root = None
    if spec is not None and spec.submodule_search_locations:
        root = os.path.dirname(os.path.abspath(next(iter(spec.submodule_search_locations))))
    elif spec is not None and spec.origin:
        root = os.path.dirname(os.path.abspath(spec.origin))
    return {"make_node": name, "root": root, "config": dict(config), "task": _task(config), "idle": idle_seconds}


def _cache(folder: str) -> None:
    """Let JAX keep compiled programs, all of them, beside the state."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(folder, "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _here(
    folder: str, setup: _worker_socket.Setup, header: Header, arrays: Arrays, context: RecordDict
) -> tuple[Header, Arrays]:
    """Do the work in this process."""
    from mocha_jax.flower._node_store import locked, open_store

    if _worker_socket.possible():
        _worker_socket.dismiss(folder)
    with locked(folder):
        store = open_store(folder, setup)
        answer = store.answer(header, arrays)
        state, dtypes = as_known(store.state_arrays())
        context["mocha"] = ArrayRecord({name: Array(array) for name, array in state.items()})
        context["mocha dtypes"] = ConfigRecord(dict(dtypes))
    return answer
