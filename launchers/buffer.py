"""The site's buffer node: the prioritized replay, and the gateway that the learner reaches across the link.

  python -m launchers.buffer --config=configs/cartpole.py --workdir=runs/mine

Listens on loopback unless told otherwise. Actors of the site and the learner both give this node's address as
--gateway, and need no other port. Writes gateway.json with the address into --workdir once it answers.
"""

import json
import sys

from absl import flags
from ml_collections import config_dict

from launchers import command_line, connection, exporting, reverb_check
from longhaul import workers
from longhaul.metrics import write_atomically

_HOST = flags.DEFINE_string("host", "127.0.0.1", "address the gateway listens on")
_PORT = flags.DEFINE_integer("port", 7720, "port the gateway listens on; 0 takes a free one", lower_bound=0)
_ORDER = flags.DEFINE_enum(
    "order",
    "priority",
    ["priority", "arrival"],
    "what leaves for the learner: draws by priority, or, as the existing approach has it, everything once in order of "
    "arrival, of which the oldest is dropped where more than config.replay.spool transitions wait",
)
_REPLAY_PORT = flags.DEFINE_integer(
    "replay_port", 0, "Reverb's port, which only this process uses; 0 takes a free one", lower_bound=0
)
_CONGESTION_CONTROL = flags.DEFINE_string(
    "tcp_congestion_control", "", "TCP's congestion control for what goes to the learner; the kernel's default if empty"
)
flags.adopt_module_key_flags(command_line)
flags.adopt_module_key_flags(exporting)
flags.declare_key_flag("credentials")
flags.declare_key_flag("insecure")


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> None:
    credentials = connection.of_host(_HOST.value, "gateway", "--host")
    reverb_check.check_versions()
    keep_jax_out()
    from longhaul.gateway import Gateway  # brings TensorFlow: not for --help or a mistyped flag

    workdir = command_line.workdir()
    metrics = exporting.writer(workdir, "gateway", config.metrics.tensorboard)
    checkpoints = workdir / "replay" if workdir is not None else None
    gateway = Gateway(
        config,
        _HOST.value,
        _PORT.value,
        _REPLAY_PORT.value,
        credentials,
        _ORDER.value,
        checkpoints,
        _CONGESTION_CONTROL.value,
    )
    try:
        gateway.start()
        address = f"{_HOST.value}:{gateway.port}"
        if workdir is not None:
            write_atomically(workdir / "gateway.json", json.dumps({"address": address}) + "\n")
        seconds = 0.0
        while not signals.stop.wait(config.metrics.period_s):
            seconds += config.metrics.period_s
            metrics.write(int(seconds), gateway.read_stats())
    finally:
        gateway.stop()
        metrics.close()


def keep_jax_out() -> None:
    """Makes this process one without JAX: TensorFlow's converters load it where they find it, and do without it."""
    sys.modules.setdefault("jax", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    command_line.run(main, "buffer")
