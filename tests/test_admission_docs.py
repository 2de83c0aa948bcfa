"""`docs/admission.md` says what is so."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.cli.config import load
from appliance.facts.bands import BANDS, AdmissionSettings
from appliance.rules.admission.capacity import SILENCE_S, UNPROVEN
from appliance.rules.admission.refusals import REASONS

DOCS = (Path(__file__).parents[1] / "docs" / "admission.md").read_text()


def test_the_bands_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([\d.]+) \| ([\d,]+) \| (\d+) s \|$", DOCS, re.M)
    assert rows == [(band.name, f"{band.ceiling:.1f}", f"{band.capacity:,}", f"{band.ttl_s:.0f}") for band in BANDS]
    assert f"`{AdmissionSettings().default_band}` (the default)" in DOCS


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    example = DOCS[DOCS.index("    [admission]") : DOCS.index("A reload takes them over")]
    file = tmp_path / "appliance.toml"
    file.write_text("\n".join(line[4:] for line in example.splitlines()))
    admission = load(file, {}).settings.admission
    assert [band.name for band in admission.bands] == ["people", "jobs"]
    assert admission.default_band == "people"


def test_every_refusal_is_named() -> None:
    assert all(f"`{reason}`" in DOCS for reason in REASONS)


def test_its_figures_are_those_of_the_code() -> None:
    assert f"At most {UNPROVEN} requests more than are proven" in DOCS.replace("Then at", "At")
    assert f"for {SILENCE_S:.0f} s, then by our own count" in " ".join(DOCS.split())
