"""Sinks for the metrics of a run."""

import importlib.util
import json
import math

import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from agn_optax import errors, sinks


def test_json_lines_writes_a_line_for_every_step(tmp_path):
    path = tmp_path / "runs" / "a.jsonl"
    for step in (1, 2):  # the second time, the file exists
        with sinks.JsonLines(path) as sink:
            sink(step, {"loss": 0.5 / step, "norm": math.nan})
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert len(lines) == step  # written before the sink is closed
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["loss"] for line in lines] == [0.5, 0.25]
    assert lines[0]["norm"] is None
    assert lines[0]["time"] <= lines[1]["time"]


def events_in(path):
    """Yield events as TensorBoard reads them: records with length and checksums."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        assert masked_crc32c(data[at : at + 8]) == int.from_bytes(
            data[at + 8 : at + 12], "little"
        )
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16


def test_tensorboard_reads_what_is_written(tmp_path):
    with sinks.TensorBoard(tmp_path, prefix="anna/") as sink:
        sink(1, {"loss": 0.5})
        sink(2, {"loss": 0.25})
    (path,) = tmp_path.iterdir()
    found = [
        (event.step, value.tag, value.simple_value)
        for event in events_in(path)
        for value in event.summary.value
    ]
    assert found == [(1, "anna/loss", 0.5), (2, "anna/loss", 0.25)]


def test_tensorboard_write_error_explains_what_is_needed(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file") as caught:
        sinks.TensorBoard(tmp_path / "file" / "runs")
    assert "semaphores, which Linux has in /dev/shm" in caught.value.__notes__[0]


def test_missing_tensorboardx_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.MissingExtraError, match=r"agn_optax\[tensorboard\]"):
        sinks.TensorBoard("/nowhere")


def test_wandb_logs_to_the_run_it_was_given(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=tmp_path, project="tests")
    try:
        with sinks.WandB(run, prefix="anna/") as sink:
            sink(3, {"loss": 0.5})
        summary = dict(run.summary)
        assert (summary["anna/loss"], summary["anna/step"]) == (0.5, 3)
    finally:
        run.finish()
    with pytest.raises(errors.InvalidTypeError, match="return value of wandb"):
        sinks.WandB("run")
