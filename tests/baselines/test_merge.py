"""Merging: nothing is lost, nothing red slips in, everything is counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import DEVICE, SOFTWARE, case, incorrect, run, timing, unsupported

from pytest_fastlayer.baselines import ACCEPTABLE, BaselineError, find, merge, parse, unused
from pytest_fastlayer.comparability import as_of, changed_since
from pytest_fastlayer.records import GREEN, NOTICE, Comparison, Origin, Verdict


def stored(**cases):
    """Those cases as a first update stores them."""
    return merge(None, run(cases), selected_all=True).record


def test_first_baseline():
    result = merge(None, run({"a": case(), "b": unsupported()}), selected_all=True)
    assert result.new == ("a", "b")
    assert list(result.record.cases) == ["a", "b"]
    assert result.summary() == "2 new, 0 changed, 0 unchanged, 0 unused, 0 refused"


def test_each_kind_is_counted():
    old = stored(same=case(), better=case(), gone=case())
    new = run({"same": case(), "better": case(speedup=5), "fresh": case()})
    result = merge(old, new, selected_all=True)
    assert (result.new, result.changed, result.unchanged, result.unused) == (
        ("fresh",),
        ("better",),
        ("same",),
        ("gone",),
    )
    assert set(result.record.cases) == {"same", "better", "fresh"}
    assert result.record.cases["better"].timing.speedup == 5


def test_partial_run_keeps_what_it_did_not_measure():
    old = stored(a=case(), b=case())
    result = merge(old, run({"a": case(speedup=5)}), selected_all=False)
    assert set(result.record.cases) == {"a", "b"}
    assert (result.changed, result.unchanged, result.unused) == (("a",), ("b",), ())
    origin = Origin(created="2026-11-30T08:00:00+00:00", commit="abc1234", software=SOFTWARE)
    assert {name: each.kept_from for name, each in result.record.cases.items()} == {
        "a": None,
        "b": origin,
    }
    # Through any number of partial runs each case says where it was measured, and no other does.
    later = run({"a": case(speedup=5)}).model_copy(update={"created": "2026-12-01T00:00:00+00:00"})
    again = merge(result.record, later, selected_all=False)
    assert (again.changed, again.unchanged) == ((), ("a", "b"))
    assert again.record.cases["b"].kept_from == origin
    last = merge(again.record, run({"b": case(speedup=6)}), selected_all=False).record
    assert last.cases["a"].kept_from == Origin(
        created=later.created, commit=later.commit, software=SOFTWARE
    )
    assert last.cases["b"].kept_from is None
    assert last.notes == ()


def test_a_kept_case_takes_its_own_run_s_software_along():
    older = SOFTWARE.model_copy(update={"torch": "2.11.0"})
    first = merge(None, run({"a": case(), "b": case()}, software=older), selected_all=True).record
    for speedup in (5, 6):
        first = merge(first, run({"b": case(speedup=speedup)}), selected_all=False).record
    assert first.cases["a"].kept_from.software == older
    assert as_of(first, "a").software == older
    assert as_of(first, "b").software == as_of(first, "none").software == SOFTWARE
    assert changed_since(SOFTWARE, as_of(first, "a").software) == ("torch 2.11.0 -> 2.13.0",)


def test_a_file_that_did_not_keep_the_software_is_read_and_says_so():
    written = Origin(created="2026-11-29T08:00:00+00:00")
    old = parse(run({"a": case(kept_from=written)}).to_json(), source="old.json")
    assert old.cases["a"].kept_from == written
    found = merge(old, run({"b": case()}), selected_all=False).record
    assert found.cases["a"].kept_from == written  # not the last run's: not known
    stored = as_of(found, "a")
    assert (stored.created, stored.commit) == (written.created, None)
    (told,) = changed_since(SOFTWARE, stored.software)
    assert told == "not known: the stored figure's software is not recorded"
    (told,) = changed_since(stored.software, SOFTWARE)
    assert "the new figure's" in told
    assert changed_since(None, stored.software) == ()


OLDER, NEWER = "2026-11-29T08:00:00+00:00", "2026-12-01T08:00:00+00:00"


@pytest.mark.parametrize(
    ("created", "is_older"),
    [
        (OLDER, True),
        ("2026-11-30T08:30:00+01:00", True),  # half past seven
        ("2026-11-30T07:59:59", True),  # without a zone: UTC
        ("2026-11-30T08:00:00+00:00", False),
        (NEWER, False),
        ("", False),  # says nothing
    ],
)
def test_an_older_figure_replaces_a_newer_one_by_name_alone(created, is_older):
    old = stored(a=case(), b=case())
    late = run({"a": case(speedup=5), "c": case()}, created=created)
    result = merge(old, late, selected_all=False)
    assert result.older == result.refused == (("a",) if is_older else ())
    if is_older:
        assert result.record == old
    accepted = merge(old, late, accept={"a"}, selected_all=False)
    assert (accepted.older, accepted.changed, accepted.new) == ((), ("a",), ("c",))


def test_only_another_figure_can_be_too_old():
    old = stored(same=case(), untimed=case(), bare=case(Verdict.ACCURATE, None))
    late = run(
        {"same": case(), "untimed": case(Verdict.ACCURATE, None), "bare": case(), "new": case()},
        created=OLDER,
    )
    assert merge(old, late, selected_all=True).refused == ()
    published = run({"same": case(speedup=2)}, provenance="published")
    assert merge(published, late, selected_all=True).refused == ()


def test_a_kept_case_is_as_old_as_its_own_run():
    mixed = merge(stored(a=case(), b=case()), run({"b": case()}, created=NEWER), selected_all=False)
    between = run({"a": case(speedup=5), "b": case(speedup=5)}, created="2026-11-30T09:00:00+00:00")
    assert merge(mixed.record, between, selected_all=True).older == ("b",)
    assert merge(between, mixed.record, selected_all=True).older == ("a",)


@pytest.mark.parametrize("verdict", sorted(set(Verdict) - GREEN - NOTICE))
def test_red_case_refuses_the_whole_update(verdict):
    red = incorrect() if verdict in (Verdict.INCORRECT, Verdict.DISHONEST) else case(verdict)
    old = stored(a=case(), b=case())
    result = merge(old, run({"a": case(speedup=9), "b": red}), selected_all=True)
    assert result.refused == ("b",)
    assert result.record == old
    assert (result.new, result.changed) == ((), ())
    assert merge(None, run({"b": red}), selected_all=True).record.cases == {}


@pytest.mark.parametrize("verdict", sorted(set(Verdict) - GREEN - NOTICE))
def test_only_a_worse_figure_can_be_accepted(verdict):
    untimed = verdict in (Verdict.INCORRECT, Verdict.DISHONEST)
    red = case(verdict, None if untimed else 4.0, reason="why")
    result = merge(None, run({"b": red}), accept={"b"}, selected_all=True)
    assert bool(result.refused) == (verdict not in ACCEPTABLE)
    if not result.refused:  # the record says that it was accepted
        assert result.record.cases["b"].verdict == verdict
        assert result.record.cases["b"].reason == "why"


def test_accepting_one_does_not_accept_another():
    worse = {"a": case(Verdict.SLOWER), "b": case(Verdict.SLOWER)}
    assert merge(None, run(worse), accept={"a"}, selected_all=True).refused == ("b",)


def test_accepting_an_unknown_name_is_an_error():
    with pytest.raises(BaselineError, match=r"not in this run: 'typo'; the run has 'a'"):
        merge(None, run(), accept={"typo"}, selected_all=True)


def test_stored_entry_stands_on_its_own():
    change = Comparison(
        baseline="b.json", provenance="measured", ratio=1.2, ci=None, threshold=0.01, p_value=1
    )
    new = {
        "faster": case(Verdict.FASTER, reason="1.2x of the stored one", comparison=change),
        "first": case(Verdict.NO_BASELINE, reason="nothing stored"),
        "untimed": case(Verdict.OTHER_MACHINE, None),
    }
    cases = merge(None, run(new), selected_all=True).record.cases
    assert [c.verdict for c in cases.values()] == [Verdict.PASS, Verdict.PASS, Verdict.ACCURATE]
    assert all(c.comparison is None and c.reason == "" for c in cases.values())
    assert cases["faster"].timing == timing(log_ratios=None)


def test_untimed_run_never_erases_a_figure():
    old = stored(a=case(), b=case())
    new = run({"a": case(Verdict.ACCURATE, None), "b": unsupported()})
    result = merge(old, new, selected_all=True)
    origin = Origin(created=old.created, commit=old.commit, software=old.software)
    for name, kept in result.record.cases.items():
        assert kept == old.cases[name].model_copy(update={"kept_from": origin})
    assert result.unchanged == ("a", "b")


def test_other_device_is_refused():
    other = DEVICE.model_copy(update={"multiprocessors": 114})
    with pytest.raises(BaselineError, match="recorded on 'NVIDIA H200'"):
        merge(stored(a=case()), run(device=other), selected_all=True)


def test_published_baseline_is_replaced_whole_or_not_at_all():
    published = run({"a": case(), "b": case()}, provenance="published")
    with pytest.raises(BaselineError, match="published and this run measured"):
        merge(published, run({"a": case()}), selected_all=False)
    result = merge(published, run({"a": case(), "b": unsupported()}), selected_all=False)
    assert result.record.provenance == "measured"
    assert result.record.cases["b"].timing is None  # a published figure must not pass as measured


def test_unused_names():
    assert unused(run({"a": case(), "b": case()}), {"b", "c"}) == ["a"]


def test_find(tmp_path):
    assert find(tmp_path, DEVICE) == tmp_path / "nvidia-h200.json"
    assert find(tmp_path / "none", DEVICE) == tmp_path / "none" / "nvidia-h200.json"
    assert find(tmp_path / "mine.json", DEVICE) == tmp_path / "mine.json"
    (tmp_path / "odd").write_text("")
    assert find(tmp_path / "odd", DEVICE) == tmp_path / "odd"


names = st.lists(st.sampled_from("abcdefgh"), unique=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(before=names, now=names, red=st.sets(st.sampled_from("abcdefgh")), whole=st.booleans())
def test_as_many_records_out_as_in(before, now, red, whole):
    old = stored(**{name: case() for name in before})
    new = run({n: case(Verdict.SLOWER if n in red else Verdict.PASS, 5) for n in now})
    result = merge(old, new, selected_all=whole)
    if red & set(now):
        assert set(result.refused) == red & set(now)
        assert result.record == old
        return
    assert set(result.record.cases) == (set(now) if whole else set(now) | set(before))
    counted = [*result.new, *result.changed, *result.unchanged, *result.unused]
    assert sorted(counted) == sorted(set(before) | set(now))
    assert set(result.unused) == (set(before) - set(now) if whole else set())
