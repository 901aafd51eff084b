"""Rules of the figures' files: whole lines, strict JSON, and readers that follow writers."""

import json
import math
import socket
import threading
import urllib.request

import pytest

from longhaul.errors import ConfigError
from longhaul.metrics import MetricsTail, MetricsWriter, jsonl_path, read_jsonl, write_atomically


def test_a_line_holds_time_step_and_the_figures(tmp_path):
    with MetricsWriter(tmp_path, "learner", tensorboard=False) as writer:
        writer.write(7, {"loss": 0.25, "updates": 7})
    (line,) = read_jsonl(tmp_path, "learner")
    assert line["step"] == 7 and line["loss"] == 0.25 and line["updates"] == 7
    assert list(line) == ["time_s", "step", "loss", "updates"]
    assert line["time_s"] > 1e9


def test_a_figure_that_is_not_finite_is_written_as_null_so_that_every_line_is_json(tmp_path):
    with MetricsWriter(tmp_path, "learner", tensorboard=False) as writer:
        writer.write(1, {"loss": math.nan, "norm": math.inf, "low": -math.inf, "fine": 1.5})
    text = jsonl_path(tmp_path, "learner").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) | {"time_s": 0} == {
        "time_s": 0,
        "step": 1,
        "loss": None,
        "norm": None,
        "low": None,
        "fine": 1.5,
    }


def test_numpy_scalars_are_written_as_plain_numbers(tmp_path):
    import numpy as np

    with MetricsWriter(tmp_path, "actor_0", tensorboard=False) as writer:
        writer.write(np.int64(3), {"a": np.float32(0.5), "b": np.int32(4), "c": np.array(2.5)})
    (line,) = read_jsonl(tmp_path, "actor_0")
    assert (line["step"], line["a"], line["b"], line["c"]) == (3, 0.5, 4, 2.5)


def test_without_a_folder_everything_is_discarded():
    writer = MetricsWriter(None, "learner")
    writer.write(1, {"loss": 1.0})
    writer.close()


def test_writing_after_close_is_ignored_and_close_may_be_repeated(tmp_path):
    writer = MetricsWriter(tmp_path, "learner")
    writer.write(1, {"loss": 1.0})
    writer.close()
    writer.close()
    writer.write(2, {"loss": 2.0})
    assert [line["step"] for line in read_jsonl(tmp_path, "learner")] == [1]


def test_a_role_that_is_started_again_appends(tmp_path):
    for step in (1, 2):
        with MetricsWriter(tmp_path, "learner", tensorboard=False) as writer:
            writer.write(step, {"loss": 1.0})
    assert [line["step"] for line in read_jsonl(tmp_path, "learner")] == [1, 2]


def test_lines_of_several_threads_are_never_mixed(tmp_path):
    writer = MetricsWriter(tmp_path, "learner", tensorboard=False)

    def write_many(base):
        for i in range(200):
            writer.write(base + i, {"figure_with_a_long_name": base + i})

    threads = [threading.Thread(target=write_many, args=(1000 * t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    lines = jsonl_path(tmp_path, "learner").read_text().splitlines()
    steps = sorted(json.loads(line)["step"] for line in lines)
    assert steps == sorted(1000 * t + i for t in range(4) for i in range(200))


def test_tensorboard_files_are_made_only_when_wanted(tmp_path):
    for role, wanted in (("learner", True), ("actor_0", False)):
        with MetricsWriter(tmp_path, role, tensorboard=wanted) as writer:
            writer.write(1, {"loss": 1.0, "bad": math.nan})
    assert list((tmp_path / "tensorboard" / "learner").glob("events.*"))
    assert not (tmp_path / "tensorboard" / "actor_0").exists()


def test_a_tail_reads_each_line_once_and_leaves_an_unfinished_one(tmp_path):
    tail = MetricsTail(tmp_path, "learner")
    assert tail.read_new() == []
    path = jsonl_path(tmp_path, "learner")
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in tail.read_new()] == [1, 2]
    assert tail.read_new() == []
    with open(path, "a") as file:
        file.write('ep": 3}\n')
    assert [line["step"] for line in tail.read_new()] == [3]


def test_a_damaged_line_does_not_hide_the_ones_after_it(tmp_path):
    path = jsonl_path(tmp_path, "learner")
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": \n17\n{"step": 3}\n')
    assert [line["step"] for line in read_jsonl(tmp_path, "learner")] == [1, 3]


def test_an_atomic_write_leaves_the_text_and_nothing_else(tmp_path):
    target = tmp_path / "sub" / "gateway.json"
    for text in ("one", "two"):
        write_atomically(target, text)
        assert target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["gateway.json"]


def test_prometheus_finds_the_newest_figures_and_a_taken_port_names_the_flag(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with MetricsWriter(None, "learner", port=port) as writer:
        writer.write(7, {"loss": 0.5, "rtt_s": math.nan})
        writer.write(9, {"loss": 0.25})
        with pytest.raises(ConfigError, match="metrics_port"):
            MetricsWriter(None, "learner", port=port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
    assert 'longhaul_loss{role="learner"} 0.25' in lines and 'longhaul_step{role="learner"} 9.0' in lines
    assert not any(line.startswith("longhaul_rtt_s{") for line in lines)
