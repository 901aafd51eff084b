"""The flag that serves a role's figures to Prometheus, and the writer that heeds it."""

from pathlib import Path

from absl import flags

from longhaul.metrics import MetricsWriter

_PORT = flags.DEFINE_integer(
    "metrics_port", 0, "serve the newest figures to Prometheus on this loopback port; 0 does not", lower_bound=0
)


def writer(workdir: Path | None, role: str, tensorboard: bool) -> MetricsWriter:
    """Returns where a role's figures go.

    Raises:
      ConfigError: the port is taken.
    """
    return MetricsWriter(workdir, role, tensorboard, _PORT.value)
