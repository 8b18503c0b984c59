"""pytest's own ``--junitxml``: properties of the suite, with and without xdist, valid xunit2."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from makers import DEVICE, run

# A run in this process drops the modules that it is the first to import, and torch and numpy do
# not survive a second import: so all that the end of a run imports comes first.
from pytest_fastlayer import environment, gate  # noqa: F401
from pytest_fastlayer.base import judging  # noqa: F401
from pytest_fastlayer.report import junit

TESTS = """
import pytest

@pytest.mark.parametrize("name", ["one", "two"])
def test_pair(name):
    pass

def test_other(record_testsuite_property):
    record_testsuite_property("theirs", "kept")
"""
#: Reports as ``paired`` leaves them, in worker and controller alike, without the minutes.
RECORDED = """
import json, pathlib
import pytest

PAYLOAD = json.loads((pathlib.Path(__file__).parent / "payload.json").read_text())

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and "name" in item.fixturenames:
        report.fastlayer = [PAYLOAD | {"name": item.callspec.params["name"]}]
    return report
"""
#: Children of each element in the xunit2 schema, in their order.
SCHEMA = {
    "testsuites": ["testsuite"],
    "testsuite": ["properties", "testcase"],
    "properties": ["property"],
    "property": [],
    "testcase": ["skipped", "error", "failure", "system-out", "system-err"],
}


def conforms(element: ET.Element) -> None:
    """Every child is one that the schema allows there, in the schema's order."""
    allowed = SCHEMA.get(element.tag, [])
    places = [allowed.index(child.tag) for child in element]
    assert places == sorted(places)
    for child in element:
        conforms(child)


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["plain", "xdist"])
def test_suite_properties(pytester, workers):
    if workers:
        pytest.importorskip("xdist")
    pytester.makepyfile(TESTS)
    pytester.makeconftest(RECORDED)
    record = run()
    header = record.model_dump(mode="json", include={"device", "software"})
    payload = {"case": record.cases["a"].model_dump(mode="json"), "header": header}
    (pytester.path / "payload.json").write_text(json.dumps(payload))
    done = pytester.runpytest_inprocess("--junitxml=junit.xml", *workers)
    done.assert_outcomes(passed=3)
    root = ET.parse(pytester.path / "junit.xml").getroot()
    conforms(root)
    suite = root.find("testsuite")
    assert suite.attrib["tests"] == "3"
    found = {p.attrib["name"]: p.attrib["value"] for p in suite.findall("properties/property")}
    assert found["fastlayer.device"] == "NVIDIA H200"
    assert found["fastlayer.torch"] == "2.13.0"
    assert {"fastlayer.triton", "fastlayer.python", "fastlayer.created"} <= set(found)
    assert "fastlayer.2.device" not in found
    if not workers:  # pytest's own property is what xdist loses; ours must not be
        assert found["theirs"] == "kept"


def test_nothing_recorded_adds_nothing(pytester):
    pytester.makepyfile("def test_nothing(): pass")
    pytester.runpytest_inprocess("--junitxml=junit.xml").assert_outcomes(passed=1)
    root = ET.parse(pytester.path / "junit.xml").getroot()
    assert not list(root.iter("property"))


def test_properties_are_named_and_clean():
    other = DEVICE.model_copy(update={"name": "bad\x1b[31m\x00name\n"})
    software = run().software.model_copy(update={"driver": "580.1", "cuda": "13.0"})
    found = junit.suite_properties([run(software=software), run(device=other, commit=None)])
    assert found["fastlayer.device"] == "NVIDIA H200"
    assert found["fastlayer.driver"] == "580.1"
    assert found["fastlayer.commit"] == "abc1234"
    assert found["fastlayer.triton"] == "3.7.1"
    assert found["fastlayer.capability"] == "9.0"
    assert found["fastlayer.2.device"] == "badname"
    assert not {"fastlayer.2.commit", "fastlayer.2.driver"} & set(found)
