"""The generated code of the wire is what the .proto says."""

from pathlib import Path

import pytest

protoc = pytest.importorskip("grpc_tools.protoc")

REPO = Path(__file__).parent.parent


def test_generated_code_is_up_to_date(tmp_path):
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{REPO}", *out, str(REPO / "longhaul/proto/longhaul.proto")]) == 0
    generated = sorted((tmp_path / "longhaul" / "proto").iterdir())
    assert len(generated) == 3
    for path in generated:
        checked_in = REPO / "longhaul" / "proto" / path.name
        assert path.read_text() == checked_in.read_text(), f"{path.name} is out of date: run `make proto`"
