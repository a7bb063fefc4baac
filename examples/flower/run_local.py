"""Run a federation on this machine: a SuperLink, a SuperNode for every task, and the app; then stop all of it.

    python run_local.py [--nodes 4] [--secure] [--folder FOLDER] [key=value ...]

With ``--secure`` all speak TLS and every node has a key. Pairs such as ``tol=1e-4`` are the run's configuration.
"""

import argparse
import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import make_data
import make_keys

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Local:
    """The processes of a federation on this machine, each with its log.

    Args:
      folder: of all that is written; default a new one, which `stop` removes.
      nodes: their number.
      secure: whether with TLS and the nodes' keys.
      env: variables of the environment to be added.
    """

    def __init__(self, folder=None, nodes=4, secure=False, env=None):
        self.folder = Path(folder or tempfile.mkdtemp(prefix="mocha-")).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.nodes, self.keys, self._own = nodes, None, folder is None
        self.port, self.processes = _free_port(), {}
        self.tables = make_data.write(self.folder / "data", nodes)
        if secure:
            self.keys = make_keys.write(self.folder / "keys", nodes)
        self.env = {
            **os.environ, "FLWR_HOME": str(self.folder / "home"), "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "COLUMNS": "200",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}", "JAX_PLATFORMS": "cpu", **(env or {}),
        }  # fmt: skip
        safe = f'root-certificates = "{self.keys}/ca.crt"' if secure else "insecure = true"
        (self.folder / "home").mkdir(exist_ok=True)
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{self.port}"\n{safe}\n'
        )
        atexit.register(self.stop)

    def superlink(self):
        """Start the SuperLink, and tell it the nodes' keys."""
        safe = ["--insecure"]
        if self.keys:
            safe = ["--ssl-ca-certfile", self.keys / "ca.crt", "--ssl-certfile", self.keys / "server.pem"]
            safe += ["--ssl-keyfile", self.keys / "server.key", "--enable-supernode-auth"]
        where = ["--host", "127.0.0.1", "--port", self.port, "--database", self.folder / "link.db"]
        begin = self._start(
            "superlink", ["flower-superlink", *safe, *where, "--disable-runtime-dependency-installation"]
        )
        self._wait("superlink", "Uvicorn running|Application startup complete", begin)
        for node in range(self.nodes if self.keys else 0):
            self.flwr("supernode", "register", self.keys / f"node{node}.pub", "local", "--name", f"node{node}")

    def start(self):
        """Start all."""
        self.superlink()
        ready = [self.node(node, wait=False) for node in range(self.nodes)]
        for node, begin in enumerate(ready):
            self._wait(f"node{node}", r"SuperNode ID: \d+", begin)

    def node(self, node, wait=True, **config):
        """Start a SuperNode."""
        safe = ["--insecure"]
        if self.keys:
            key = self.keys / f"node{node}"
            safe = ["--root-certificates", self.keys / "ca.crt", "--auth-supernode-private-key", key]
        config = {"task": node, "data": str(self.tables[node]), "state": str(self.folder / f"node{node}"), **config}
        where = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", _free_port()]
        begin = self._start(
            f"node{node}", ["flower-supernode", *safe, *where, "--node-config", _pairs(config)]
        )  # fmt: skip
        if wait:
            self._wait(f"node{node}", r"SuperNode ID: \d+", begin)
        return begin

    def submit(self, **config):
        """Start the app, and return the run's number."""
        config = {"num_tasks": self.nodes, "result": str(self.folder / "model.npz"), **config}
        pairs = _pairs({name.replace("_", "-"): value for name, value in config.items()})
        answer = json.loads(
            self.flwr("run", HERE / "app", "local", "--run-config", pairs, "--format", "json")
        )  # fmt: skip
        if not answer.get("success"):
            raise RuntimeError(f"flwr run: {answer}")
        return int(answer["run-id"])

    def status(self, run):
        """Return the status of a run, e.g. ``finished:completed``."""
        return json.loads(self.flwr("list", "local", "--run-id", run, "--format", "json"))["runs"][0]["status"]

    def wait(self, run, seconds=600):
        """Wait until a run has ended, and return its status."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (status := self.status(run)).startswith("finished"):
                return status
            time.sleep(1.0)
        raise TimeoutError(f"run {run} has not ended after {seconds} s:\n{self.log(run)}")

    def log(self, run):
        """Return the log of a run."""
        return self.flwr("log", run, "local", "--show")

    def flwr(self, *args):
        """Call Flower's command."""
        done = subprocess.run(
            [BIN / "flwr", *map(str, args)], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(map(str, args))}: {done.stdout}{done.stderr}")
        return done.stdout

    def kill(self, name):
        """Kill a process of ours, and do not ask it."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def found(self, word=""):
        """Return the numbers of this federation's processes whose commands have a word; on Linux alone."""
        some = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = f"FLWR_HOME={self.folder}/home".encode() in (path / "environ").read_bytes().split(b"\0")
                if ours and word.encode() in (path / "cmdline").read_bytes():
                    some.append(int(path.name))
        return some

    def stop(self):
        """Stop all processes, the nodes first."""
        atexit.unregister(self.stop)
        for name in sorted(self.processes, key=lambda name: name == "superlink"):
            self.processes[name].terminate()
        end = time.monotonic() + 8
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        self.processes = {}
        # What the SuperLink and the SuperNodes had started ends by itself soon, but for the workers.
        end = time.monotonic() + 5
        while time.monotonic() < end and (self.found("flwr") or self.found("flower-")):
            time.sleep(0.2)
        for pid in self.found():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while time.monotonic() < end + 5 and self.found():
            time.sleep(0.1)
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name, command):
        path = self.folder / f"{name}.log"
        begin = path.stat().st_size if path.exists() else 0
        with path.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *map(str, command[1:])], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.folder, env=self.env, start_new_session=True,
            )  # fmt: skip
        return begin

    def _wait(self, name, pattern, begin, seconds=120):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = (self.folder / f"{name}.log").read_text(errors="replace")[begin:]
            if re.search(pattern, text):
                return
            if self.processes[name].poll() is not None:
                raise RuntimeError(f"{name} has ended:\n{text[-3000:]}")
            time.sleep(0.1)
        raise TimeoutError(f"{name} is not ready after {seconds} s:\n{text[-3000:]}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def _pairs(config):
    """Flower's form of a configuration."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())


def main():
    """Do what the command says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all is stopped
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--nodes", type=int, default=4)
    command.add_argument("--secure", action="store_true")
    command.add_argument("--folder")
    command.add_argument("pairs", nargs="*", metavar="key=value")
    asked = command.parse_args()
    pairs = dict(pair.split("=", 1) for pair in asked.pairs)
    config = {name: _value(value) for name, value in pairs.items()}
    with Local(asked.folder, asked.nodes, asked.secure) as local:
        local.start()
        run = local.submit(**config)
        status = local.wait(run)
        print(local.log(run))
        print(f"{status}; load {os.getloadavg()[0]:.1f}")
        if status != "finished:completed":
            sys.exit(1)


def _value(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
