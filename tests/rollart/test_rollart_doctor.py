"""The doctor names what is missing and what brings it."""

from __future__ import annotations

import pytest

from rollart import doctor
from rollart.cli.main import main


def test_this_environment_can_train() -> None:
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["torch"].verdict == findings["vllm"].verdict == findings["ray"].verdict == "ok"
    assert all(finding.remedy for finding in findings.values() if finding.verdict == "missing")


def test_a_missing_package_stops_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "missing" in said
    assert "make clean" in said


def test_mooncake_without_its_library_is_a_limit_not_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_loads", lambda library: False)
    (found,) = [finding for finding in doctor.examine() if finding.name == "mooncake"]
    assert found.verdict == "limited"
    assert "libibverbs1" in found.remedy
