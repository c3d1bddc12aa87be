"""Ray's side: a cluster of this machine alone, and our workers and learner as its actors."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bebop_megatron.launcher import LOOPBACK
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.ledger import Order
from bebop_megatron.rl.records import Event, Rollout
from bebop_megatron.rl.weights import Shards

# nothing is reported home; full memory is the operating system's affair; workers are no less important than others; the
# last keeps Ray, which replaces a loopback address by another, on the loopback interface
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@contextmanager
def cluster(config: RLConfig, weight_bytes: int) -> Iterator[Any]:
    """Ray on the loopback interface for as long as the block runs; yields the module.

    The object store holds the policies that rollouts may ask for, and batches on their way.

    Raises:
        ValueError: Ray is not installed.
    """
    # read when it is imported
    os.environ |= _ENVIRONMENT
    try:
        import ray
    except ImportError as error:
        raise ValueError("reinforcement learning needs Ray: pip install 'bebop-megatron[rl]'") from error

    # short: the path of a socket is limited
    folder = tempfile.mkdtemp(prefix="rl")
    finished = False
    # of the caller's: not ours to end
    before = set(psutil.Process().children(recursive=True))
    try:
        _start(
            ray,
            address="local",
            num_cpus=config.workers + config.learner_processes,
            object_store_memory=max(128 << 20, (config.staleness + 4) * weight_bytes + (64 << 20)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
            _temp_dir=folder,
        )
        yield ray
        finished = True
    finally:
        started = [child for child in psutil.Process().children(recursive=True) if child not in before]
        ray.shutdown()
        _end(started)
        if not finished:
            _keep_logs(Path(folder), Path(config.output) / "logs")
        shutil.rmtree(folder, ignore_errors=True)


def _keep_logs(session: Path, folder: Path) -> None:
    """What workers and learner printed, for whoever looks for the reason of a failure."""
    for path in session.glob("session_2*/logs/worker-*"):
        if path.stat().st_size:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.name)


def _end(processes: list[Any]) -> None:
    """Wait until everything that Ray and our actors started is gone; what does not end by itself is killed."""
    _, alive = psutil.wait_procs(processes, timeout=2)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=30)


def _start(ray: Any, **settings: Any) -> None:
    """Start Ray; it gives its processes half a minute, which a busy machine may not be content with."""
    # an interrupt from the terminal is for us, who end Ray in order. It reaches its servers as well, which inherit that
    # it is ignored: without them Ray's own end waits for a minute
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for attempt in range(3):
            try:
                ray.init(**settings)
                return
            # Ray raises nothing more special
            except Exception as error:
                if "timed out" not in str(error) or attempt == 2:
                    raise
                ray.shutdown()
    finally:
        signal.signal(signal.SIGINT, before)


class WorkerActor:
    """A rollout worker that fetches the policy it is asked to be."""

    def __init__(self, name: str, config: RLConfig) -> None:
        self._name, self._config = name, config
        self._holds: object = None

    def load(self) -> int:
        """Load the model; returns the process id. Not in the constructor, whose errors Ray buries."""
        from bebop_megatron.rl.rollout import load_worker

        self._worker = load_worker(self._name, self._config)
        return os.getpid()

    def rollout(self, order: Order, policy: object, weights: list[Any]) -> Rollout:
        """Decode an order as `policy`, whose shards `weights` refers to, one for each process of the learner."""
        import ray

        if self._holds != policy:
            began = time.time()
            self._worker.set_weights(ray.get(weights))
            self._holds = policy
            self._worker.note("weights", began, order.step)
        return self._worker.rollout(order)


class LearnerActor:
    """One process of the learner."""

    def __init__(self, config: RLConfig, vocab_size: int, resume_step: int, rank: int, world: int, port: int) -> None:
        self._settings = {"resume_step": resume_step, "rank": rank, "world": world, "port": port}
        self._config, self._vocab_size = config, vocab_size

    def load(self) -> int:
        """Build the model and load its checkpoint; returns the process id."""
        from bebop_megatron.rl.learner import Learner

        self._learner = Learner(self._config, self._vocab_size, **self._settings)
        return os.getpid()

    def step(self, step: int, rollouts: list[Rollout]) -> dict[str, Any]:
        """One optimizer step."""
        return self._learner.step(step, rollouts)

    def export(self) -> tuple[Event, Shards]:
        """The weights that this process holds; the result belongs to whoever asks, and outlives this process."""
        return self._learner.export()

    def save(self, step: int) -> Event:
        """A checkpoint."""
        return self._learner.save(step)
